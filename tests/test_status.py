"""`python -m hpc.status`: what a record tells, torn or whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import ROOT

from hpc import logs, status
from hpc.errors import UsageError
from hpc.login.shares import shares
from hpc.login.status import report_lines, running_share, starts_of

NODES = [["n1", 0, 4], ["n1", 4, 4], ["n2", 8, 4]]
FIRST = {"rank": 3, "host": "n2", "code": 137, "message": "killed by SIGKILL"}


def steps(begin: int, end: int) -> dict[str, Any]:
    return {"steps_from": begin, "steps_to": end, "checkpoint": f"step-{end}"}


EVENTS: list[dict[str, Any]] = [
    {"time": 90, "event": "submitted", "job_id": "77"},
    {"time": 100, "event": "started", "attempt": 0, "nodes": NODES},
    {"time": 110, "event": "ended", "attempt": 0, "restart": 0, "code": 137, "started": True, "first": FIRST},
    {
        "time": 110,
        "event": "decided",
        "attempt": 0,
        "decision": "again",
        "reason": "a worker was killed",
        **steps(0, 5),
    },
    {"time": 115, "event": "started", "attempt": 0, "nodes": NODES},
    {"time": 135, "event": "ended", "attempt": 0, "restart": 1, "code": 75, "started": True, "first": None},
    {"time": 135, "event": "decided", "attempt": 0, "decision": "requeue", "reason": "saved", **steps(0, 20)},
    {"time": 135, "event": "requeued", "attempt": 0, "job_id": "77"},
    {"time": 180, "event": "started", "attempt": 1, "nodes": NODES},
    {"time": 200, "event": "ended", "attempt": 1, "restart": 0, "code": 0, "started": True, **steps(20, 40)},
]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "record.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_attempts_causes_steps_and_the_share_of_time(tmp_path: Path) -> None:
    lines = report_lines(written(tmp_path, EVENTS))
    assert lines[0].endswith("job 77") and lines[1].split() == "attempt began ran hosts steps exit how it ended".split()
    assert "n1,n2" in lines[2] and "0 to 5 " in lines[2] and "137" in lines[2]
    assert lines[2].endswith("a worker was killed; started again")
    assert lines[3].startswith("0, restart 1") and lines[3].endswith("75    saved; requeued")
    assert "20 to 40" in lines[4] and lines[4].endswith("0     finished")
    assert lines[5] == "ranks ran 50 % of 1 min 40 s between first start and last end"


def test_share_is_of_the_time_between_first_start_and_last_end() -> None:
    assert running_share(starts_of(EVENTS)) == (50.0, 100.0)
    assert running_share(starts_of(EVENTS[:2])) is None
    assert running_share([]) is None


def at(time: float, event: str, attempt: int = 0, restart: int = 0, **more: Any) -> dict[str, Any]:
    return {"time": time, "event": event, "attempt": attempt, "restart": restart, **more}


TRAINING: list[dict[str, Any]] = [
    {"time": 0, "event": "submitted", "job_id": "77"},
    at(12, "started", began=10),
    at(15, "resumed", step=0, checkpoint=None),
    at(20, "first_step", step=1),
    at(40, "saved", step=20, checkpoint="step-20", stall_s=1, seconds=3, bytes=9),
    at(61, "ended", code=137, started=True, last_step=40),  # 41 s since the first step, half of the steps lost
    at(61, "decided", decision="again"),
    at(64, "started", restart=1, began=63),
    at(66, "resumed", restart=1, step=20, checkpoint="step-20"),
    at(70, "first_step", restart=1, step=21),
    at(90, "stopping", restart=1, step=41, reason="SIGTERM"),
    at(92, "saved", restart=1, step=41, checkpoint="step-41", stall_s=1, seconds=2, bytes=9),
    at(93, "ended", restart=1, code=75, started=True, last_step=41),
    at(93, "decided", restart=1, decision="requeue"),
    at(94, "requeued"),
    at(120, "started", attempt=1, began=118),
    at(122, "resumed", attempt=1, step=41, checkpoint="step-41"),
    at(125, "first_step", attempt=1, step=42),
    at(200, "ended", attempt=1, code=0, started=True, last_step=100),
]


def test_what_the_time_was_used_for(tmp_path: Path) -> None:
    used = shares(TRAINING)
    assert used is not None
    assert used.waiting == 10 + 25 and used.start_up == 10 + 7 + 7 and used.saving == 1 + 2
    assert used.recomputed == 20 and used.productive == 20 + 20 + 75 and used.other == 2 + 1
    assert used.whole == 200
    line = report_lines(written(tmp_path, TRAINING))[-1]
    assert line.startswith(
        "of 3 min 20 s since the submission: productive 58 %, start-up 12 %, recomputed 10 %, saving 2 %"
    )
    assert shares(EVENTS) is None  # a script says nothing of its steps


@pytest.mark.parametrize("missing", range(len(TRAINING)))
def test_the_shares_bear_that_any_event_is_missing(missing: int) -> None:
    for events in (TRAINING[:missing] + TRAINING[missing + 1 :], TRAINING[missing:], TRAINING[:missing]):
        used = shares(events)
        if used is None:
            continue
        parts = vars(used).values()
        assert all(part >= 0 for part in parts)
        times = [event["time"] for event in events]
        assert used.whole <= max(times) - min(min(times), 10) + 1e-6


def test_a_start_without_an_end_lasts_to_its_last_sign_of_life() -> None:
    used = shares(TRAINING[:5])
    assert used is not None and used.productive == 19 and used.whole == 40


def test_a_record_cut_at_any_byte_is_readable(tmp_path: Path) -> None:
    whole = (written(tmp_path, EVENTS) / "record.jsonl").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "record.jsonl").write_bytes(whole[:cut])
        assert report_lines(tmp_path)


@pytest.mark.parametrize("missing", range(len(EVENTS)))
def test_any_event_may_be_missing(tmp_path: Path, missing: int) -> None:
    events = EVENTS[:missing] + EVENTS[missing + 1 :]
    lines = report_lines(written(tmp_path, events))
    assert len(lines) >= 4


def test_a_killed_controller_leaves_an_attempt_without_an_end(tmp_path: Path) -> None:
    lines = report_lines(written(tmp_path, EVENTS[:2] + EVENTS[8:]))
    assert lines[2].endswith("no end in the record: it runs, or its controller was killed")
    assert lines[3].endswith("finished")


def test_a_start_that_never_came_to_ranks(tmp_path: Path) -> None:
    ended = {"time": 1, "event": "ended", "attempt": 0, "restart": 0, "code": 1, "started": False, "first": None}
    lines = report_lines(written(tmp_path, [ended, {**ended, "restart": 1, "time": 2}]))
    assert lines[2].split()[:2] == ["0", "never"] and lines[3].startswith("0, restart 1")


def test_strange_values_do_not_stop_it(tmp_path: Path) -> None:
    strange = [
        {"event": "started", "attempt": "x", "nodes": 7, "time": None},
        {"event": "ended", "code": "y", "first": 3},
    ]
    assert report_lines(written(tmp_path, [*strange, *EVENTS]))


def test_the_elements_of_an_array_follow_each_other(tmp_path: Path) -> None:
    written(tmp_path, EVENTS[:1])
    (tmp_path / "array-3").mkdir()
    written(tmp_path / "array-3", EVENTS[1:])
    lines = report_lines(tmp_path)
    assert lines[1] == "no attempt has begun" and any(line.endswith("array-3") for line in lines)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"record\.jsonl"):
        report_lines(tmp_path)


def test_the_door_prints_and_refuses_in_one_line(tmp_path: Path) -> None:
    def door(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpc", "status", *words], cwd=ROOT, capture_output=True, text=True, timeout=30
        )

    (tmp_path / "run").mkdir()
    done = door(str(written(tmp_path / "run", EVENTS)))
    assert done.returncode == 0 and "ranks ran 50 %" in done.stdout
    done = door(str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("hpc.status: error")


@pytest.mark.parametrize("door", [status.main, logs.main])
def test_a_run_that_one_may_not_read_is_told_in_one_line(
    tmp_path: Path, door: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a colleague sees it: the directory, or only its record, is its owner's alone."""
    (tmp_path / "record.jsonl").write_text("{}\n")
    for path in (tmp_path / "record.jsonl", tmp_path):
        path.chmod(0)
        if os.getuid() == 0:
            os.seteuid(54321)
        try:
            code = door([str(tmp_path)])
        finally:
            os.seteuid(os.getuid())
            path.chmod(0o755)
        said = capsys.readouterr().err
        assert code == 2 and said.count("\n") == 1 and "Permission denied" in said and "chmod" in said, said
