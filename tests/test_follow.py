"""Following a job: exit codes, a job that comes back, and one that Slurm has forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc.errors import SlurmCommandError
from hpc.login import follow
from hpc.slurm.states import JobState


@pytest.mark.parametrize(
    ("state", "code", "wanted"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "42:0", 42),
        ("FAILED", "0:9", 137),
        ("CANCELLED", "0:15", 143),
        ("CANCELLED", "0:0", 1),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "", 1),
        ("OUT_OF_MEMORY", "0:125", 253),
    ],
)
def test_f04_only_success_is_0(state: str, code: str, wanted: int) -> None:
    assert follow.exit_code({"ExitCode": code}, JobState(state)) == wanted


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_EVERY_S", "ASK_EVERY_S", "COME_BACK_S"):
        monkeypatch.setattr(follow, name, 0.01)


Answers = list[dict[str, str] | SlurmCommandError]


def _follow(monkeypatch: pytest.MonkeyPatch, answers: Answers, state: JobState | None = None) -> tuple[int, list[str]]:
    left = list(answers)

    def show(job_id: str) -> dict[str, str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, SlurmCommandError):
            raise answer
        return answer

    monkeypatch.setattr(follow.commands, "show_job", show)
    monkeypatch.setattr(follow.commands, "state_of", lambda job_id: state)
    told: list[str] = []
    return follow.follow("5", Path("/nowhere/slurm-5.out"), tell=told.append), told


def test_preempted_job_is_followed_to_its_next_attempt(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "COME_BACK_S", 30.0)
    preempted = {"JobState": "PREEMPTED", "Requeue": "1"}
    done = {"JobState": "COMPLETED", "ExitCode": "0:0"}
    code, told = _follow(monkeypatch, [preempted, preempted, {"JobState": "PENDING", "Reason": "Priority"}, done])
    assert code == 0 and told[0] == "job 5 PREEMPTED" and "waits for: Priority" in told[1]


def test_preempted_job_that_does_not_come_back_ends(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told = _follow(monkeypatch, [{"JobState": "PREEMPTED", "Requeue": "1", "ExitCode": "0:15"}])
    assert code == 143 and "PREEMPTED" in told[-1]
    assert _follow(monkeypatch, [{"JobState": "PREEMPTED", "Requeue": "0", "ExitCode": "0:15"}])[0] == 143


def test_f08_forgotten_job_is_no_success(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told = _follow(monkeypatch, [{"JobState": "RUNNING", "NodeList": "n1"}, {}])
    assert code == 1 and "forgotten" in told[-1]
    code, told = _follow(monkeypatch, [{}], JobState.COMPLETED)
    assert code == 0 and "COMPLETED" in told[-1]


def test_silence_of_the_controller_is_told_once_and_borne(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    silence = SlurmCommandError("scontrol gave no answer")
    code, told = _follow(monkeypatch, [silence, silence, silence, {"JobState": "COMPLETED", "ExitCode": "0:0"}])
    assert code == 0 and len([line for line in told if "no answer" in line]) == 1


def test_hostile_reason_stays_one_line(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = {"JobState": "PENDING", "Reason": "x\x1b[2J\ny"}
    _, told = _follow(monkeypatch, [pending, {"JobState": "COMPLETED"}])
    assert all(line.isprintable() for line in told)


def test_a_job_that_runs_on_is_asked_about_less_often(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "CALM_AFTER_S", 0.0)
    monkeypatch.setattr(follow, "ASK_CALMLY_EVERY_S", 0.4)
    began = time.monotonic()
    running, done = {"JobState": "RUNNING", "NodeList": "n1"}, {"JobState": "COMPLETED", "ExitCode": "0:0"}
    code, _ = _follow(monkeypatch, [running, running, done])
    assert code == 0 and time.monotonic() - began >= 0.8
