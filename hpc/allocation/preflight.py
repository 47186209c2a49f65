"""The check of an allocation as people ask for it (hpc.doctor --allocation) and as a run does before its first attempt."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc import exitcodes
from hpc.allocation import allocation as allocations
from hpc.allocation import badnodes, checkup, fitness
from hpc.allocation.allocation import Allocation
from hpc.allocation.checkup import RANKS as RANKS
from hpc.config import Loaded
from hpc.errors import NeverStarted, UsageError
from hpc.rundir import write_private

LIMIT_S = 120.0
"""The most that the check before the first start may take."""

Table = Callable[[Sequence[Sequence[str]]], Sequence[str]]


def report(
    loaded: Loaded, *, limit_s: float, quick: bool, remember: bool, table: Table, tell: Callable[[str], None]
) -> int:
    """Check the allocation of this process and tell all of it; returns 0 when nothing was found, else 1.

    Raises:
        UsageError: this is no allocation, or nothing can be written in the working directory.
        NeverStarted: srun cannot be run.
    """
    allocation = allocations.here()
    if not allocation.job_id:
        raise UsageError(
            "no allocation here (SLURM_JOB_ID is not set): salloc --nodes=2 --gpus-per-node=4, and this command in its shell"
        )
    folder = Path.cwd() / f".hpc-checkup-{allocation.run_id}-{secrets.token_hex(4)}"
    try:
        checked = checkup.check(allocation, loaded, folder, limit_s=limit_s, with_ranks=not quick, say=tell)
    except OSError as error:
        raise UsageError(
            f"{folder.parent}: {error.strerror or error}; start it in a folder that all nodes share"
        ) from None
    findings = fitness.judge(checked)
    for line in table([fitness.COLUMNS, *fitness.rows(checked)]):
        tell(line)
    for line in checkup.overall(checked):
        tell(line)
    for finding in findings:
        tell(f"{finding.node}: {finding.what}")
    unfit = fitness.unfit(findings)
    if not findings and not checked.notes:
        tell("all nodes are fit")
    if fitness.is_elsewhere(unfit, checked):
        tell("every node is named, so the cause lies elsewhere; none is to be left out for it")
    elif unfit and remember:
        badnodes.write_down(allocation, {node: f"not fit: {what}" for node, what in unfit.items()}, say=tell)
        tell(f"remembered, so that later runs leave them out: {', '.join(unfit)}")
    elif unfit:
        tell(f"to leave them out: --exclude={','.join(unfit)}, or --remember for a day")
    return exitcodes.FAILED if findings or checked.notes else exitcodes.DONE


def refuses(
    allocation: Allocation,
    loaded: Loaded,
    folder: Path,
    *,
    say: Callable[[str], None],
    complain: Callable[[str], None],
) -> bool:
    """Check the allocation before the first start; True when a node is not fit.

    Why is then noted in the attempt's folder, as a task's own refusal would be. A check that itself cannot be made
    refuses nothing.
    """
    try:
        checked = checkup.check(allocation, loaded, folder / "preflight", limit_s=LIMIT_S, say=say)
    except (OSError, NeverStarted) as error:
        complain(f"warning: no preflight: {error}")
        return False
    findings = fitness.judge(checked)
    for line in (*checkup.overall(checked), *(f"{finding.node}: {finding.what}" for finding in findings)):
        say(f"preflight: {line}")
    unfit = fitness.unfit(findings)
    if not unfit:
        return False
    message = f"not fit: {'; '.join(f'{node}: {what}' for node, what in unfit.items())}"
    facts = {
        "rank": -1,
        "host": ",".join(unfit),
        "code": exitcodes.UNAVAILABLE,
        "time": time.time(),
        "message": message,
    }
    facts["unfit"] = not fitness.is_elsewhere(unfit, checked)
    write_private(folder / "error-task-preflight.json", json.dumps(facts))
    return True
