"""What happens after an attempt has ended: done, again inside the allocation, requeue, or fail. Pure.

| what happened | decision |
|---|---|
| exit code 0 | done |
| cancelled, or Slurm is ending the job already | fail: it never comes back by our doing |
| stopped at the keyboard | fail |
| saved and wants to go on (75), or ended by a notice | requeue, without limit as long as steps are made |
| worker, data-loader process or controller killed, worker hung, agent lost, or never started | again, `max_restarts` times in a row with a growing pause; when a notice came or time is short: requeue |
| the same, and a node of the allocation is lost | requeue without that node where the job may come back, else fail |
| an exception, or any other exit code | fail at once, unless `retry_failures` allows another try |
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace

from hpc import exitcodes
from hpc.slurm.states import JobState

PAUSES_S = (2.0, 10.0, 30.0)
"""Before the first, second and every later restart inside the allocation that follows a start without a step that is kept."""
STALLED_LIMIT = 3
"""Attempts in a row without a new step, after which the run is given up."""
SHORTEST_S = 60.0
"""Less time than this is not worth a restart inside the allocation."""
_DETERMINED = (exitcodes.USAGE, exitcodes.BAD_ENVIRONMENT, 126, 127)  # the same start would end the same way


class Action(enum.Enum):
    """What to do next; the value is its word in the record."""

    DONE = "done"
    AGAIN = "again"
    REQUEUE = "requeue"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and why in words that a log line can hold."""

    action: Action
    reason: str
    pause_s: float = 0.0
    is_retry: bool = False
    """Counts against `retry_failures` and not against `max_restarts`."""
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt does without, if there are enough others."""
    stalled: bool = False
    """Given up because too many attempts made no step."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The user's budgets: see launch.max_restarts and launch.retry_failures."""

    max_restarts: int = 3
    retry_failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one start of the step ended, and what is known around it."""

    code: int
    """As a shell gives it."""
    started: bool = True
    """Ranks ran."""
    reported: bool = True
    """The agents could say how it ended; otherwise they were killed with their step."""
    orphaned: str | None = None
    """In words, that the start ended since its controller was killed; None for any other end."""
    by_us: bool = False
    """The first worker to end badly was ended by its agent, on a signal that came from outside."""
    peer_gone: bool = False
    """The first failure says no more than that another rank could no longer be reached."""
    loader_killed: str | None = None
    """What killed a data-loader process of the first worker to fail, as "Killed"; None when nothing did."""
    hung: str | None = None
    """Which worker was ended because it was stopped or made no step, and how; None for none."""
    notice: str | None = None
    """The signal that came as a notice to the controller, by name."""
    notice_signals: tuple[int, ...] = (signal.SIGTERM,)
    """What counts as a notice."""
    keyboard: bool = False
    """Ctrl-C, or the terminal has gone."""
    state: JobState | None = None
    """Slurm's word; None when it has none (a local run, no answer)."""
    preempted: bool = False
    """Slurm says that the job is to make room."""
    cut_short: str | None = None
    """Why Slurm is ending the job by itself, as "the time limit", when it would not bring it back; None: it is not."""
    may_requeue: bool = True
    """Or a new job may be sent that goes on."""
    lost_nodes: tuple[str, ...] = ()
    local: bool = False
    attempt: int = 0
    steps_from: int | None = None
    """The newest checkpoint's step before this attempt; None when steps cannot be known (a command after "--")."""
    steps_to: int | None = None
    seconds: float = 0.0
    """How long this attempt has run, its restarts included."""
    stalled: int = 0
    """Attempts in a row before this one that made no step."""
    progress: bool = False
    """The start that ended made a step that is kept; always False where steps cannot be known."""
    restarts: int = 0
    """Starts inside this allocation for killed or lost workers, since the last one with such a step."""
    retried: int = 0
    """Starts inside this allocation after failures of the program."""
    time_left_s: float | None = None


def made_steps(ending: Ending) -> bool:
    """Whether this attempt made a step that is kept.

    A command's steps are unknown: they count as made when the attempt ran for longer than a minute.
    """
    if ending.steps_from is None or ending.steps_to is None:
        return ending.seconds > 60.0
    return ending.steps_to > ending.steps_from


def killed_by(code: int) -> str | None:
    """The signal that an exit code stands for, or None."""
    try:
        return signal.Signals(code - 128).name if code > 128 else None
    except ValueError:
        return None


def decide(ending: Ending, limits: Limits) -> Decision:
    """The decision; the same for the same ending, whatever the clock and the machine say."""
    code = ending.code
    if code == exitcodes.DONE:
        return Decision(action=Action.DONE, reason="finished")
    stopped = _stopped_by_somebody(ending)
    if stopped is not None:
        return Decision(action=Action.FAIL, reason=stopped)
    noticed = _notice(ending)
    if code == exitcodes.WANTS_ANOTHER_ATTEMPT:
        return _come_back(ending, f"saved and left{f' after {noticed}' if noticed else ''}")
    by_signal = killed_by(code)
    if noticed and (ending.by_us or (by_signal and code - 128 in ending.notice_signals)):
        if ending.local:
            return Decision(action=Action.FAIL, reason=f"ended by {noticed}")
        return _come_back(ending, f"ended by {noticed} without a save of its own")
    broken = _broken(ending)
    if broken is not None:
        return _again_or_back(ending, limits, broken, noticed)
    words = exitcodes.describe(code)
    if ending.retried < limits.retry_failures and not noticed:
        why = f"the program {words}, retry {ending.retried + 1} of {limits.retry_failures}"
        return replace(_again(ending, why), is_retry=True)
    return Decision(action=Action.FAIL, reason=f"the program {words}")


def _stopped_by_somebody(ending: Ending) -> str | None:
    state = ending.state
    if ending.keyboard or killed_by(ending.code) == "SIGINT":
        return "stopped at the keyboard"
    if state is JobState.CANCELLED:
        return "the job was cancelled"
    if state is not None and (state.is_completing or state.is_finished) and ending.cut_short is None:
        lost = f", and the allocation has lost {', '.join(ending.lost_nodes)}" if ending.lost_nodes else ""
        return f"Slurm is ending the job itself ({state.value}): cancelled, or to be requeued by Slurm{lost}"
    return None


def _notice(ending: Ending) -> str | None:
    """What announced the end: a signal's name, or preemption; None when nothing did."""
    if ending.preempted:
        return "preemption"
    if ending.cut_short is not None:
        return ending.cut_short
    if ending.notice is not None:
        return ending.notice
    if ending.by_us:  # the agents got a signal that did not come to the batch step
        return "a signal to the job's steps"
    number = ending.code - 128
    if number in ending.notice_signals and number != signal.SIGTERM:
        return signal.Signals(number).name
    return None


def _broken(ending: Ending) -> str | None:
    """In what way the start was broken by something other than the program's own error; None when it was not."""
    if ending.orphaned is not None:
        return ending.orphaned
    if not ending.started:
        return None if ending.code in _DETERMINED else "no rank was started"
    if ending.hung is not None:
        return ending.hung
    name = killed_by(ending.code)
    if name is not None:
        return f"a worker or its agent was killed by {name}"
    if ending.code == exitcodes.UNAVAILABLE:
        return "an agent or its node was lost"
    if not ending.reported:
        return f"the agents were lost with their step (exit code {ending.code})"
    if ending.loader_killed is not None:
        return f"a data-loader process was ended by a signal ({ending.loader_killed})"
    if ending.peer_gone:
        return "the ranks could no longer reach each other"
    return None


def _come_back(ending: Ending, why: str) -> Decision:
    if not made_steps(ending) and ending.stalled + 1 >= STALLED_LIMIT:
        count = ending.stalled + 1
        return Decision(action=Action.FAIL, reason=f"{why}, but {count} attempts in a row made no step", stalled=True)
    return Decision(action=Action.REQUEUE, reason=why)


def _again(ending: Ending, why: str) -> Decision:
    """After a start that came forward there is nothing to wait for: its processes have been swept away by now."""
    used = ending.restarts + ending.retried
    pause_s = 0.0 if ending.progress else PAUSES_S[min(used, len(PAUSES_S) - 1)]
    return Decision(action=Action.AGAIN, reason=why, pause_s=pause_s)


def _again_or_back(ending: Ending, limits: Limits, broken: str, noticed: str | None) -> Decision:
    if ending.lost_nodes:
        broken += f"; the allocation has lost {', '.join(ending.lost_nodes)}"
        if not ending.may_requeue:
            return Decision(action=Action.FAIL, reason=f"{broken}, and the job may not be requeued")
        return replace(_come_back(ending, broken), exclude=ending.lost_nodes)
    if ending.state is not None and ending.state.is_pending:
        return _come_back(ending, f"{broken}; Slurm has taken the job back into the queue")
    if noticed and not ending.local:
        return _come_back(ending, f"{broken} after {noticed}")
    if noticed:
        return Decision(action=Action.FAIL, reason=f"{broken} after {noticed}")
    if ending.restarts >= limits.max_restarts:
        used = f" after {ending.restarts} restarts (launch.max_restarts)" if ending.restarts else ""
        return Decision(action=Action.FAIL, reason=f"{broken}{used}")
    decision = _again(ending, f"{broken}, restart {ending.restarts + 1} of {limits.max_restarts}")
    if ending.time_left_s is not None and ending.time_left_s < decision.pause_s + SHORTEST_S:
        if not ending.may_requeue:
            return Decision(action=Action.FAIL, reason=f"{broken}, and {ending.time_left_s:.0f} s are left")
        return _come_back(ending, f"{broken}, and {ending.time_left_s:.0f} s are too few for a restart")
    return decision
