"""The decision after an attempt: a table of what happened against what is done."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hpc.allocation.history import stalled_attempts
from hpc.allocation.policy import Action, Ending, Limits, decide, made_steps
from hpc.slurm.states import JobState

KILL, TERM, USR2, INT = (128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT))
NOTICES = (int(signal.SIGTERM), int(signal.SIGUSR2))
DONE, AGAIN, REQUEUE, FAIL = Action.DONE, Action.AGAIN, Action.REQUEUE, Action.FAIL
MADE = {"steps_from": 100, "steps_to": 120}
NONE = {"steps_from": 100, "steps_to": 100}

TABLE: list[tuple[dict[str, Any], Action, str]] = [
    # the good ends
    ({"code": 0}, DONE, "finished"),
    ({"code": 0, "notice": "SIGTERM", "state": JobState.RUNNING}, DONE, "finished"),  # Q19
    ({"code": 75, **MADE}, REQUEUE, "saved"),
    ({"code": 75, "notice": "SIGUSR2", **MADE}, REQUEUE, "saved and left after SIGUSR2"),
    ({"code": 75, "preempted": True, **MADE}, REQUEUE, "preemption"),  # Q09
    ({"code": 75, "restarts": 3, "attempt": 50, **MADE}, REQUEUE, "saved"),
    ({"code": 75, "local": True, **MADE}, REQUEUE, "saved"),
    ({"code": 75, "may_requeue": False, **MADE}, REQUEUE, "saved"),
    ({"code": 75, "state": JobState.PENDING, **MADE}, REQUEUE, "saved"),  # Slurm was quicker
    # somebody wants it to end
    ({"code": 75, "state": JobState.CANCELLED, **MADE}, FAIL, "cancelled"),
    ({"code": 75, "state": JobState.COMPLETING, **MADE}, FAIL, "COMPLETING"),
    ({"code": 75, "state": JobState.COMPLETING, "timed_out": True, **MADE}, REQUEUE, "after the time limit"),
    ({"code": TERM, "state": JobState.COMPLETING, "timed_out": True, "by_us": True, **MADE}, REQUEUE, "the time limit"),
    ({"code": 1, "state": JobState.COMPLETING, "timed_out": True, **MADE}, FAIL, "exited 1"),
    ({"code": TERM, "state": JobState.COMPLETING, "notice": "SIGTERM", "by_us": True}, FAIL, "COMPLETING"),
    ({"code": KILL, "state": JobState.CANCELLED}, FAIL, "cancelled"),
    ({"code": KILL, "state": JobState.TIMEOUT}, FAIL, "TIMEOUT"),
    ({"code": INT, "keyboard": True, "local": True}, FAIL, "keyboard"),
    ({"code": INT, "by_us": True}, FAIL, "keyboard"),
    # ended by the notice itself
    ({"code": TERM, "by_us": True, "notice": "SIGTERM"}, REQUEUE, "ended by SIGTERM"),
    ({"code": TERM, "by_us": True}, REQUEUE, "signal to the job's steps"),  # GraceTime: the batch step hears nothing
    ({"code": TERM, "by_us": True, "started": False}, REQUEUE, "signal to the job's steps"),  # during the start-up
    ({"code": TERM, "by_us": True, "notice": "the time limit"}, REQUEUE, "ended by the time limit"),
    ({"code": KILL, "by_us": True, "notice": "SIGTERM"}, REQUEUE, "ended by SIGTERM"),
    ({"code": USR2}, REQUEUE, "ended by SIGUSR2"),  # Q08
    ({"code": USR2, "notice_signals": (int(signal.SIGTERM),)}, AGAIN, "SIGUSR2"),  # not the one that was chosen
    ({"code": TERM, "by_us": True, "notice": "SIGTERM", "local": True}, FAIL, "ended by SIGTERM"),
    # killed, lost, never started
    ({"code": KILL}, AGAIN, "restart 1 of 3"),
    ({"code": 139}, AGAIN, "SIGSEGV"),
    ({"code": TERM}, AGAIN, "SIGTERM"),  # one worker, by somebody's hand
    ({"code": KILL, "local": True}, AGAIN, "SIGKILL"),
    ({"code": KILL, "restarts": 2}, AGAIN, "restart 3 of 3"),
    ({"code": KILL, "restarts": 3}, FAIL, "after 3 restarts"),
    ({"code": KILL, "notice": "SIGTERM", **MADE}, REQUEUE, "after SIGTERM"),
    ({"code": KILL, "preempted": True, **MADE}, REQUEUE, "after preemption"),
    ({"code": KILL, "time_left_s": 30.0, **MADE}, REQUEUE, "30 s are too few"),
    ({"code": KILL, "time_left_s": 30.0, "may_requeue": False, **MADE}, FAIL, "30 s are left"),
    ({"code": KILL, "time_left_s": 3000.0}, AGAIN, "restart 1"),
    ({"code": 69}, AGAIN, "lost"),
    ({"code": 1, "reported": False}, AGAIN, "lost with their step"),
    ({"code": 1, "peer_gone": True}, AGAIN, "no longer reach"),
    ({"code": 1, "started": False}, AGAIN, "no rank was started"),
    ({"code": 69, "started": False, "restarts": 3}, FAIL, "no rank was started"),
    ({"code": 78, "started": False}, FAIL, "exited 78"),
    ({"code": 127, "started": False}, FAIL, "exited 127"),
    ({"code": 69, "lost_nodes": ("n2",), **MADE}, REQUEUE, "lost n2"),
    ({"code": 69, "lost_nodes": ("n2",), "may_requeue": False}, FAIL, "may not be requeued"),
    ({"code": 69, "state": JobState.PENDING, **MADE}, REQUEUE, "Slurm has taken"),
    # the program's own failures: Q18
    ({"code": 1}, FAIL, "exited 1"),
    ({"code": 42}, FAIL, "exited 42"),
    ({"code": 255}, FAIL, "exited 255"),
    ({"code": 1, "notice": "SIGTERM", "preempted": True}, FAIL, "exited 1"),
    # no step, again and again
    ({"code": 75, "stalled": 1, **NONE}, REQUEUE, "saved"),
    ({"code": 75, "stalled": 2, **NONE}, FAIL, "3 attempts in a row"),
    ({"code": 75, "stalled": 2, **MADE}, REQUEUE, "saved"),
    ({"code": TERM, "by_us": True, "stalled": 2, **NONE}, FAIL, "3 attempts"),
    ({"code": 75, "stalled": 2, "seconds": 61.0}, REQUEUE, "saved"),  # a command: its steps are unknown
    ({"code": 75, "stalled": 2, "seconds": 20.0}, FAIL, "3 attempts"),
]


@pytest.mark.parametrize(("what", "action", "words"), TABLE)
def test_what_happened_decides(what: dict[str, Any], action: Action, words: str) -> None:
    decision = decide(Ending(**{"notice_signals": NOTICES, **what}), Limits())
    assert decision.action is action and words in decision.reason, decision
    assert "\n" not in decision.reason


def test_pauses_grow() -> None:
    pauses = [decide(Ending(code=KILL, restarts=used), Limits(max_restarts=9)).pause_s for used in range(5)]
    assert pauses == [2, 10, 30, 30, 30]


def test_q18_failures_are_retried_only_when_asked_and_on_their_own_budget() -> None:
    limits = Limits(max_restarts=0, retry_failures=2)
    decisions = [decide(Ending(code=1, retried=used), limits) for used in range(3)]
    assert [decision.action for decision in decisions] == [AGAIN, AGAIN, FAIL]
    assert all(decision.is_retry for decision in decisions[:2])
    assert decide(Ending(code=KILL), limits).action is FAIL
    assert decide(Ending(code=1, restarts=3), Limits(retry_failures=1)).action is AGAIN


def test_q07_a_notice_in_the_first_seconds_costs_no_budget() -> None:
    ending = Ending(code=75, notice="SIGUSR2", seconds=2.0, time_left_s=280.0, notice_signals=NOTICES)
    assert decide(ending, Limits(max_restarts=0)).action is REQUEUE


def test_a_cancelled_job_comes_back_in_no_case() -> None:
    for code in (1, 69, 75, KILL, TERM, USR2):
        for state in (JobState.CANCELLED, JobState.COMPLETING):
            for by_us in (True, False):
                ending = Ending(code=code, state=state, by_us=by_us, preempted=True, notice="SIGTERM", **MADE)
                assert decide(ending, Limits(retry_failures=9)).action is FAIL


def test_only_kept_steps_count() -> None:
    assert made_steps(Ending(code=75, **MADE)) and not made_steps(Ending(code=75, seconds=900, **NONE))
    assert made_steps(Ending(code=75, seconds=61)) and not made_steps(Ending(code=75, seconds=59))


def test_stalled_attempts_are_those_in_a_row_of_this_job() -> None:
    def decided(attempt: int, made: bool, job: str = "7", decision: str = "requeue") -> dict[str, Any]:
        return {"event": "decided", "job_id": job, "attempt": attempt, "decision": decision, "made_steps": made}

    events = [decided(0, False), decided(1, True), decided(2, False), decided(3, False), {"event": "ended"}]
    assert stalled_attempts(events, "7", 4) == 2
    assert stalled_attempts(events, "7", 2) == 0
    assert stalled_attempts(events, "8", 4) == 0
    assert stalled_attempts([*events, decided(4, False, decision="again")], "7", 5) == 2
