"""What Slurm's words for a job's state mean: waiting, running, ending, over, and how it ended.

A state that is not known is none of these; above all it is never success.
Source: squeue(1), "JOB STATE CODES", and the state names of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import enum
import re


class JobState(enum.Enum):
    """A job's state; the value is Slurm's full name, as scontrol and sacct write it."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def is_pending(self) -> bool:
        """It waits for nodes, or for somebody to release it."""
        return self in _PENDING

    @property
    def is_running(self) -> bool:
        """It has its nodes and has not begun to end."""
        return self in _RUNNING

    @property
    def is_completing(self) -> bool:
        """It is ending; a requeued job goes on from here to PENDING, so this is not the end."""
        return self in _COMPLETING

    @property
    def is_finished(self) -> bool:
        """It is over, unless Slurm brings it back: see `may_come_back`."""
        return self in _FINISHED

    @property
    def may_come_back(self) -> bool:
        """Slurm may still put a requeueable job in this state back into the queue by itself."""
        return self in _MAY_COME_BACK

    @property
    def succeeded(self) -> bool:
        """It is over and ended with exit code 0."""
        return self is JobState.COMPLETED


_PENDING = frozenset(
    {
        JobState.PENDING,
        JobState.CONFIGURING,
        JobState.REQUEUED,
        JobState.REQUEUE_FED,
        JobState.REQUEUE_HOLD,
        JobState.RESV_DEL_HOLD,
        JobState.SPECIAL_EXIT,
    }
)
_RUNNING = frozenset(
    {JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.RESIZING, JobState.SIGNALING},
)
_COMPLETING = frozenset({JobState.COMPLETING, JobState.STAGE_OUT})
_FINISHED = frozenset(JobState) - _PENDING - _RUNNING - _COMPLETING - {JobState.UNKNOWN}
_MAY_COME_BACK = frozenset({JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL}) | _COMPLETING

_COMPACT = {
    "PD": JobState.PENDING,
    "CF": JobState.CONFIGURING,
    "R": JobState.RUNNING,
    "S": JobState.SUSPENDED,
    "ST": JobState.STOPPED,
    "RS": JobState.RESIZING,
    "SI": JobState.SIGNALING,
    "CG": JobState.COMPLETING,
    "SO": JobState.STAGE_OUT,
    "RQ": JobState.REQUEUED,
    "RF": JobState.REQUEUE_FED,
    "RH": JobState.REQUEUE_HOLD,
    "RD": JobState.RESV_DEL_HOLD,
    "SE": JobState.SPECIAL_EXIT,
    "CD": JobState.COMPLETED,
    "CA": JobState.CANCELLED,
    "F": JobState.FAILED,
    "TO": JobState.TIMEOUT,
    "NF": JobState.NODE_FAIL,
    "PR": JobState.PREEMPTED,
    "BF": JobState.BOOT_FAIL,
    "DL": JobState.DEADLINE,
    "OOM": JobState.OUT_OF_MEMORY,
    "RV": JobState.REVOKED,
}
_NAMES = {**{state.value: state for state in JobState}, **_COMPACT}


def parse_state(text: str) -> JobState:
    """The state in a text of Slurm's: a full or a compact name, "CANCELLED by 1000", or "FAILED,COMPLETING".

    Of several names the one that says that the job is not over yet counts; what is no name of a state gives UNKNOWN.
    """
    states = {_NAMES[word] for word in re.split(r"[\s,|+]+", text.strip().upper()) if word in _NAMES}
    if text.strip().endswith("+"):  # sacct cuts names at its column's width: "OUT_OF_ME+"
        states |= {state for state in JobState if state.value.startswith(text.strip()[:-1].upper())}
    unfinished = states - _FINISHED
    candidates = unfinished & _COMPLETING or unfinished or states
    return candidates.pop() if len(candidates) == 1 else JobState.UNKNOWN
