"""In the allocation: nodes that failed are written down for later, and those of earlier runs are known."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from hpc import ledger
from hpc.allocation.allocation import Allocation
from hpc.ledger import Failure


def write_down(allocation: Allocation, nodes: Mapping[str, str], *, say: Callable[[str], None]) -> None:
    """Remember these nodes and why, "lost" or so; a ledger that cannot be written is told, and no more."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    now = ledger.clock()
    found = [
        Failure(node=node, time=now, why=why, job_id=allocation.job_id, cluster=cluster) for node, why in nodes.items()
    ]
    if not found or not allocation.job_id:
        return
    try:
        ledger.add(found)
    except OSError as error:
        say(f"{', '.join(nodes)} could not be noted as failed: {error.strerror or error}")


def known(hours: float) -> Sequence[Failure]:
    """The failures of the last hours on this cluster; 0 hours: none."""
    return ledger.recent(hours, cluster=os.environ.get("SLURM_CLUSTER_NAME", "")) if hours > 0 else ()
