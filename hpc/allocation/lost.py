"""Which nodes of the allocation are lost: by Slurm's word, by an agent's silence, or since an agent calls its node unfit."""

from __future__ import annotations

from collections.abc import Sequence

from hpc import exitcodes
from hpc.allocation.allocation import Allocation
from hpc.allocation.verdict import End
from hpc.errors import NodelistError, SlurmCommandError
from hpc.slurm import commands
from hpc.slurm.nodelist import expand_nodelist


def lost_nodes(allocation: Allocation, end: End) -> tuple[str, ...]:
    """Nodes that Slurm has given up or that are silent, when an agent or its node has gone; none in a local run."""
    first = end.first or {}
    gone = end.started and (not end.reported or end.code == exitcodes.UNAVAILABLE)
    if allocation.job_id and first.get("unfit"):
        return named(str(first["host"]).split(","), allocation.node_list)
    if not allocation.job_id or not gone or allocation.nodes < 2 or not allocation.node_list:
        return ()
    silent = named([str(first.get("host"))], allocation.node_list) if first.get("silent") else ()
    return tuple(dict.fromkeys((*down_nodes(allocation), *silent)))


def down_nodes(allocation: Allocation) -> tuple[str, ...]:
    """Those that Slurm has given up, as far as it can be asked."""
    try:
        return tuple(commands.lost_nodes(allocation.node_list))
    except SlurmCommandError:
        return ()


def named(hosts: Sequence[str], node_list: str) -> tuple[str, ...]:
    """The nodes of a host list that these host names stand for; a host may call itself by a longer name."""
    try:
        nodes = expand_nodelist(node_list)
    except NodelistError:
        return ()
    short = {host.split(".")[0] for host in hosts}
    return tuple(node for node in nodes if node in hosts or node.split(".")[0] in short)
