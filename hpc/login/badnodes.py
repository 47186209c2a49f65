"""At submission: the nodes that failed this user's runs lately are left out, in so far as the job can do without them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc import fields, ledger, yamltext
from hpc.errors import ConfigError, NodelistError, SlurmCommandError
from hpc.quantities import gpu_request
from hpc.schema import SlurmConfig
from hpc.slurm import commands, site
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
    """Which nodes this job had better not get. Asks Slurm only when there are failures to tell of; never refuses."""
    failures = ledger.recent(slurm.exclude_failed_h) if slurm.exclude_failed_h > 0 and slurm.nodelist is None else []
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


def _fits(kind: tuple[str, str], slurm: SlurmConfig) -> bool:
    """Whether the job could run on a node with these GPUs and features; where that is not plain to see, it cannot."""
    gpus, features = kind
    if slurm.constraint is not None and slurm.constraint not in features.split(","):
        return False
    if slurm.gpus_per_node is None:
        return True
    wanted, count = gpu_request(slurm.gpus_per_node)
    there = _counts(site.gpus(gpus))
    return (sum(there.values()) if wanted is None else there.get(wanted, 0)) >= count


def _counts(gpus: str) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)(?:([^:,]+):)?(\d+)", gpus):
        found[kind] = found.get(kind, 0) + int(count)
    return found
