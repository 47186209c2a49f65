"""The decision after an attempt: a table of what happened against what is done."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from hpc.allocation.allocation import Allocation
from hpc.allocation.history import attempts_of_earlier_jobs, lost_hosts, stalled_attempts
from hpc.allocation.policy import Action, Ending, Limits, decide, made_steps
from hpc.allocation.requeue import JobFacts, exclusion, facts_of
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
    ({"code": 69, "state": JobState.COMPLETING, "lost_nodes": ("gpu2",), **MADE}, FAIL, "has lost gpu2"),
    (
        {"code": 75, "state": JobState.COMPLETING, "cut_short": "the time limit", **MADE},
        REQUEUE,
        "after the time limit",
    ),
    (
        {"code": TERM, "state": JobState.COMPLETING, "cut_short": "the time limit", "by_us": True, **MADE},
        REQUEUE,
        "the time limit",
    ),
    ({"code": 1, "state": JobState.COMPLETING, "cut_short": "the time limit", **MADE}, FAIL, "exited 1"),
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
    ({"code": 124, "hung": "rank 1 on n1 stopped for 11 s"}, AGAIN, "rank 1 on n1 stopped for 11 s, restart 1 of 3"),
    ({"code": 124, "hung": "rank 1 on n1 hung", "restarts": 3}, FAIL, "hung after 3 restarts"),
    ({"code": 124}, FAIL, "exited 124"),  # the program's own word
    ({"code": 69}, AGAIN, "lost"),
    ({"code": 1, "reported": False}, AGAIN, "lost with their step"),
    ({"code": 1, "peer_gone": True}, AGAIN, "no longer reach"),
    ({"code": 1, "loader_killed": "Killed"}, AGAIN, "data-loader process"),
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


def test_a_lost_node_is_excluded_and_nothing_else_is() -> None:
    lost = decide(Ending(code=69, lost_nodes=("n2", "n3"), **MADE), Limits())
    assert lost.action is REQUEUE and lost.exclude == ("n2", "n3")
    for what, _, _ in TABLE:
        if "lost_nodes" not in what:
            assert decide(Ending(**{"notice_signals": NOTICES, **what}), Limits()).exclude == ()


KIND, OTHER = ("gpu:a100:4", "rack1"), ("gpu:v100:4", "rack1")
USABLE = {"n1": KIND, "n3": ("gpu:a100:4", "rack2"), "n4": OTHER, "n5": KIND}


@pytest.mark.parametrize(
    ("nodes", "facts", "excluded"),
    [
        (3, {}, ("n2",)),
        (3, {"excluded": "n[8-9]"}, ("n8", "n9", "n2")),  # the user's stay
        (3, {"excluded": "n5"}, ()),  # it would wait for ever
        (4, {}, ()),  # n4 is of another kind
        (3, {"features": "rack1"}, ()),
        (2, {"features": "rack1"}, ("n2",)),
        (2, {"names_nodes": True}, ()),
        (2, {"excluded": "n2"}, ()),
    ],
)
def test_nodes_are_excluded_where_enough_others_are_left(
    nodes: int, facts: dict[str, Any], excluded: tuple[str, ...]
) -> None:
    allocation = Allocation(job_id="7", nodes=nodes, node_list="n[1-2]")
    assert exclusion(["n2"], JobFacts(**facts), allocation, USABLE) == excluded


def test_an_end_by_slurm_is_told_from_scancel() -> None:
    fields = {"JobState": "COMPLETING", "Reason": "TimeLimit", "Requeue": "1"}
    assert facts_of(fields).cut_short == "the time limit"
    assert facts_of({**fields, "JobState": "CANCELLED"}).cut_short is None
    scancelled = {**fields, "Reason": "None", "PreemptTime": "2026-11-30T09:41:20", "EndTime": "2026-11-30T09:41:40"}
    assert facts_of(scancelled).cut_short is None  # during the grace time of a preemption
    assert facts_of({**scancelled, "PreemptTime": "None"}).cut_short is None
    assert facts_of({**scancelled, "PreemptTime": "2026-11-30T09:41:40"}).cut_short == "preemption"
    killed = {"JobState": "COMPLETING", "Reason": "JobLaunchFailure", "ExitCode": "0:9"}
    for state in ("COMPLETING", "FAILED"):
        assert facts_of({**killed, "JobState": state}).cut_short == "the death of its batch script"
    for other in ({"Reason": "None"}, {"ExitCode": "1:0"}, {"JobState": "CANCELLED"}):
        assert facts_of({**killed, **other}).cut_short is None


def test_the_attempts_of_a_run_are_numbered_over_its_jobs() -> None:
    def event(kind: str, job: str | None, attempt: int, **more: Any) -> dict[str, Any]:
        return {"event": kind, "job_id": job, "attempt": attempt, **more}

    events = [event("started", "7", 0), event("ended", "7", 1), event("started", "9", 2), event("resumed", None, 5)]
    assert attempts_of_earlier_jobs(events, "7") == 3 and attempts_of_earlier_jobs(events, "9") == 2
    assert attempts_of_earlier_jobs(events, "12") == 3 and attempts_of_earlier_jobs([], "7") == 0
    no_step = {"decision": "requeue", "made_steps": False}
    events = [event("decided", "7", 0, **no_step), event("decided", "7", 1, **no_step)]
    assert stalled_attempts(events, "9", 2) == 0
    events.append({"event": "continued", "job_id": "7", "new_job_id": "9"})
    assert stalled_attempts(events, "9", 2) == 2


def test_hosts_that_were_lost_are_known_to_the_next_attempt_alone() -> None:
    first = {"code": 69, "host": "n4.site"}
    events = [
        {"event": "decided", "attempt": 0, "lost_nodes": ["n2"]},
        {"event": "ended", "attempt": 1, "first": first},
        {"event": "decided", "attempt": 1, "lost_nodes": ["n3"]},
        {"event": "ended", "attempt": 1, "first": {"code": 137, "host": "n5"}},
    ]
    assert (
        lost_hosts(events, 2) == ("n4.site", "n3") and lost_hosts(events, 1) == ("n2",) and lost_hosts(events, 3) == ()
    )


def test_pauses_grow() -> None:
    pauses = [decide(Ending(code=KILL, restarts=used), Limits(max_restarts=9)).pause_s for used in range(5)]
    assert pauses == [2, 10, 30, 30, 30]
    assert decide(Ending(code=KILL, progress=True), Limits()).pause_s == 0


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
