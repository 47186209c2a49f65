"""Slurm's side of coming back: what it says about this job, and the requeue, which is the controller's last act.

Slurm 22.05 and 24.11: `scontrol requeue` of a running job takes its nodes at once, a second call can hit the attempt
that follows, and a job that was preempted or lost a node is requeued by Slurm itself.
"""

from __future__ import annotations

import enum
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc.allocation.allocation import Allocation
from hpc.config import Loaded
from hpc.errors import SlurmCommandError
from hpc.rundir import RunDirectory
from hpc.slurm import commands
from hpc.slurm.states import JobState, parse_state

TRY_PAUSES_S = (1.0, 5.0)
ANSWER_LIMIT_S = 10.0
"""How long scontrol may take: what hangs is tried again, and the time left may be short."""
KILLED_WITHIN_S = 60.0
"""How long after a requeue Slurm may take to end the batch step."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What `scontrol show job` says; everything is unknown when there was no answer."""

    state: JobState | None = None
    restarts: int | None = None
    may_requeue: bool = True
    is_batch: bool = True
    preempted: bool = False
    end_time: float | None = None
    """Seconds since 1970."""
    timed_out: bool = False
    """Slurm is ending the job for its time limit, and for nothing else."""


class Requeued(enum.Enum):
    """How an attempt to requeue ended."""

    QUEUED = "queued"
    """It is in the queue, or on its way there."""
    ENDING = "ending"
    """Slurm is ending the job, as after scancel: it was left alone."""
    NOT_ALLOWED = "not allowed"
    REFUSED = "refused"


def job_facts(allocation: Allocation, timeout_s: float = ANSWER_LIMIT_S) -> JobFacts:
    """What Slurm says about this job now.

    Raises:
        SlurmCommandError: scontrol gave no answer.
    """
    return facts_of(commands.show_job(allocation.job_id, timeout_s=timeout_s))


def facts_of(fields: Mapping[str, str]) -> JobFacts:
    """The facts in the fields of `scontrol show job`."""
    restarts = fields.get("Restarts", "")
    state = parse_state(fields["JobState"]) if "JobState" in fields else None
    return JobFacts(
        state=state,
        restarts=int(restarts) if restarts.isdecimal() else None,
        may_requeue=fields.get("Requeue", "1") != "0" and fields.get("BatchFlag", "1") != "0",
        is_batch=fields.get("BatchFlag", "1") != "0",
        # also set in past tense after a requeue: only a running job is being preempted
        preempted=fields.get("PreemptTime", "None") not in ("None", "") and fields.get("JobState") == "RUNNING",
        end_time=_moment(fields.get("EndTime", "")),
        # seen with 22.05.8: a job that scancel ends is COMPLETING too, without this reason
        timed_out=state is not None and state.is_completing and fields.get("Reason") == "TimeLimit",
    )


def _moment(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def requeue(
    allocation: Allocation, *, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Requeued:
    """Put the job back into the queue, unless it is there, was cancelled, or a newer attempt has begun.

    Three tries. After QUEUED Slurm ends this process soon.
    """
    tried = False
    for pause in (*TRY_PAUSES_S, None):
        try:
            facts = job_facts(allocation)
            verdict = _without_asking(facts, allocation.attempt, tried)
            if verdict is not None:
                return verdict
            tried = True
            commands.requeue(allocation.run_id, timeout_s=ANSWER_LIMIT_S)
            return Requeued.QUEUED
        except SlurmCommandError as error:
            more = f"; trying again in {pause:g} s" if pause is not None else ""
            say(f"{error}{more}")
        if pause is not None:
            sleep(pause)
    return Requeued.REFUSED


def _without_asking(facts: JobFacts, attempt: int, tried: bool) -> Requeued | None:
    """The outcome when no requeue must be asked for, else None. `tried`: an earlier call may have been heard."""
    if facts.restarts is not None and facts.restarts > attempt:
        return Requeued.QUEUED
    if facts.state is not None and facts.state.is_pending:
        return Requeued.QUEUED
    if facts.timed_out and not tried and facts.may_requeue:
        return None  # Slurm takes it back although it is ending: seen with 22.05.8
    if facts.state is not None and (facts.state.is_completing or facts.state.is_finished):
        return Requeued.QUEUED if tried and facts.state.is_completing else Requeued.ENDING
    return None if facts.may_requeue else Requeued.NOT_ALLOWED


def continuation(allocation: Allocation, loaded: Loaded, run_dir: RunDirectory, *, is_batch: bool = True) -> str:
    """The command that goes on with this run, to be typed by the user."""
    path = shlex.quote(str(run_dir.path))
    if not allocation.job_id:
        return f"python -m hpc.launch --local --run-dir {path}"
    if not is_batch:
        return f"python -m hpc.launch --run-dir {path}"
    words = ["python -m hpc.submit", f"--config {shlex.quote(str(run_dir.config_file))}"]
    slurm = loaded.config.slurm
    if allocation.nodes != slurm.nodes:  # a raw sbatch: its options are not in the configuration
        words.append(f"--nodes {allocation.nodes}")
    if allocation.gpus_per_node and not str(slurm.gpus_per_node or "").endswith(str(allocation.gpus_per_node)):
        words.append(f"--gpus-per-node {allocation.gpus_per_node}")
    if allocation.array_index is not None and "array" in slurm.extra:
        words.append("slurm.extra.array=null")
    return " ".join([*words, f"run_dir={path}"])
