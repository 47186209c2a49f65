"""At submission: the nodes that failed this user's runs lately are left out, in so far as the job can do without them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc import fields, ledger, yamltext
from hpc.errors import ConfigError, NodelistError, SlurmCommandError
from hpc.quantities import gpu_request, slurm_memory
from hpc.schema import SlurmConfig
from hpc.slurm import commands, site
from hpc.slurm.commands import NodeKind
from hpc.slurm.nodelist import expand_nodelist
from hpc.yamltext import Branch

HOW_TO_SWITCH = "slurm.exclude_failed_h=0 takes them all, python -m hpc.doctor --failed-nodes shows why"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What is said to sbatch and to the user."""

    options: tuple[str, ...] = ()
    """Of sbatch; they count before those in the script, so the user's own --exclude is in them."""
    note: str | None = None


def left_out(slurm: SlurmConfig) -> LeftOut:
    """Which nodes this job had better not get. Asks Slurm only when there are failures to tell of; never refuses.

    None for a job that asks for certain nodes, or for those of a reservation: it may have no others to go to.
    """
    certain = slurm.nodelist is not None or slurm.reservation is not None or bool(slurm.extra.get("nodefile"))
    failures = ledger.recent(slurm.exclude_failed_h) if slurm.exclude_failed_h > 0 and not certain else []
    if not failures:
        return LeftOut()
    try:
        failures = ledger.recent(slurm.exclude_failed_h, cluster=site.cluster_name())
        partition = slurm.partition or next((one.name for one in commands.partitions() if one.is_default), "")
        usable = [name for name, kind in commands.usable_nodes(partition).items() if _fits(kind, slurm)]
        already = expand_nodelist(slurm.exclude) if slurm.exclude else []
    except (SlurmCommandError, NodelistError) as error:
        return LeftOut(note=f"nodes that failed lately are not left out: {error}")
    chosen = ledger.to_leave_out(failures, usable, already=already, wanted=slurm.nodes)
    if not chosen:
        return LeftOut()
    names = ",".join([*([slurm.exclude] if slurm.exclude else []), *(failure.node for failure in chosen)])
    now = ledger.clock()
    told = ", ".join(failure.told(now) for failure in chosen)
    return LeftOut(options=(f"--exclude={names}",), note=f"left out: {told}; {HOW_TO_SWITCH}")


def left_out_again(config_file: Path) -> LeftOut:
    """The same for a run that is sent once more, by what its configuration asked for."""
    try:
        branch = yamltext.read_file(config_file).entries.get("slurm")
        values = fields.read_branch(branch, fields.field_types(SlurmConfig), []) if isinstance(branch, Branch) else {}
    except ConfigError as error:
        return LeftOut(note=f"nodes that failed lately are not left out: {error}")
    return left_out(SlurmConfig(**values))


def _fits(node: NodeKind, slurm: SlurmConfig) -> bool:
    """Whether the job could run on a node of this kind; where that is not plain to see, it cannot."""
    if slurm.constraint is not None and slurm.constraint not in node.features.split(","):
        return False
    wanted, count = (None, 0) if slurm.gpus_per_node is None else gpu_request(slurm.gpus_per_node)
    there = _counts(site.gpus(node.gpus))
    if (sum(there.values()) if wanted is None else there.get(wanted, 0)) < count:
        return False
    cores = slurm.cpus_per_task or (slurm.cpus_per_gpu or 0) * max(1, count)
    memory = max(_mib(slurm.mem), _mib(slurm.mem_per_gpu) * count, _mib(slurm.mem_per_cpu) * max(1, cores))
    return cores <= node.cores and memory <= node.memory_mib


def _mib(amount: str | None) -> int:
    """An amount of memory in MiB, a started one as a whole; 0 for none, and for all of a node's."""
    if amount is None:
        return 0
    text = slurm_memory(amount)
    return math.ceil(int(text.rstrip("KMGT")) * {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(text[-1], 1))


def _counts(gpus: str) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)(?:([^:,]+):)?(\d+)", gpus):
        found[kind] = found.get(kind, 0) + int(count)
    return found
