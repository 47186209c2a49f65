"""Whose a process is: left over by a job that is over, a live job's, somebody's at a terminal, or nobody can tell.

Pure: what is known goes in, a standing and its reason come out. In doubt a process is not a leftover.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.node.processes import Mark, Process
from hpc.slurm.commands import LiveJob

CLOCK_S = 5.0
"""How far the clocks of a node and of Slurm's controller may be apart."""


class Standing(enum.Enum):
    LEFTOVER = "leftover"
    """Its job, or its attempt of it, is over: it may be ended."""
    LIVE = "live"
    """Its job runs, or is being ended by Slurm."""
    SPARED = "spared"
    """Not to be ended whatever its job: a login shell, a terminal, another node's, this command itself."""
    UNMARKED = "no job"
    """It carries no job's mark."""
    UNKNOWN = "unknown"
    """Slurm could not be asked."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and by whom it is asked."""

    node: str
    cluster: str
    """"" when it is not known."""
    ancestors: frozenset[int]
    """The process that asks, and those above it."""
    own: Mark | None
    """The mark of the process that asks."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    process: Process
    standing: Standing
    reason: str

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Job and restarts: once over, over for good, since every requeue counts one more. None when it is not known."""
        mark = self.process.mark
        return (mark.job_id, mark.restarts) if mark is not None and mark.counted else None


def judge(process: Process, place: Place, jobs: Mapping[str, LiveJob] | None, over: str = "") -> Judgement:
    """Judge one process by the jobs that are not over (None: Slurm gave no answer).

    `over`: HPC_MARK of a start that has ended, as its controller says. What was seen has to be older than the answer.
    """
    standing, reason = _without_slurm(process, place, over) or _with_slurm(process, jobs)
    return Judgement(process=process, standing=standing, reason=reason)


def must_ask(process: Process, place: Place, over: str = "") -> bool:
    """Whether only Slurm can tell about this process."""
    return _without_slurm(process, place, over) is None


def _without_slurm(process: Process, place: Place, over: str) -> tuple[Standing, str] | None:
    mark, own = process.mark, place.own
    if process.pid in place.ancestors:
        return Standing.SPARED, "this command, or what started it"
    if mark is None:
        return Standing.UNMARKED, "no job's mark"
    if mark.node != place.node or (place.cluster and mark.cluster != place.cluster):
        return Standing.SPARED, f"of node {mark.node}" + (f" of {mark.cluster}" if mark.node == place.node else "")
    if process.is_login_shell:
        return Standing.SPARED, "a login shell"
    if process.terminal:
        return Standing.SPARED, "it has a terminal"
    if process.cgroup_job not in (None, mark.job_id):
        return Standing.LIVE, f"in job {process.cgroup_job}'s control group"
    if over and mark.start == over:
        return Standing.LEFTOVER, f"start {over.split('.')[2]} of job {mark.job_id} is over"
    if own is not None and own.job_id == mark.job_id and mark.counted and own.counted:
        if mark.restarts < own.restarts:
            return Standing.LEFTOVER, f"attempt {mark.restarts} of job {mark.job_id} is over"
        if mark.restarts == own.restarts:
            if own.start and mark.start and start_number(mark) < start_number(own):
                return Standing.LEFTOVER, f"start {start_number(mark)} of job {mark.job_id} is over"
            return Standing.LIVE, f"job {mark.job_id} runs"
    return None


def start_number(mark: Mark) -> int:
    """The number of the start in HPC_MARK, which it has."""
    word = mark.start.split(".")[2]
    return int(word) if word.isascii() and word.isdecimal() else 0


def _with_slurm(process: Process, jobs: Mapping[str, LiveJob] | None) -> tuple[Standing, str]:
    mark = process.mark
    assert mark is not None
    if jobs is None:
        return Standing.UNKNOWN, f"of job {mark.job_id}; Slurm cannot be asked"
    job = jobs.get(mark.job_id)
    if job is None:
        return Standing.LEFTOVER, f"job {mark.job_id} is over"
    older = job.began is not None and process.began < job.began - CLOCK_S
    if job.restarts > mark.restarts and (mark.counted or older):
        return Standing.LEFTOVER, f"attempt {mark.restarts} of job {mark.job_id} is over"
    return Standing.LIVE, f"job {mark.job_id} is {job.state.value.lower()}"
