"""What the words that ranks left prove, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc.login import noticeproof
from hpc.rundir import RunDirectory


def run_of(folder: Path, *events: dict[str, Any], words: list[dict[str, Any]]) -> RunDirectory:
    """A run directory as a controller and ranks leave it."""
    run = RunDirectory(folder)
    run.attempt(0).mkdir()
    for event in events:
        run.append_event(event.pop("event"), **event)
    for word in words:
        (run.attempt(0) / f"notice-{word['rank']}.json").write_text(json.dumps(word))
    (run.attempt(0) / "notice-9.json").write_text('{"rank": 9, "hea')  # a rank that was killed in writing
    return run


STARTED = {"event": "started", "attempt": 0, "world_size": 2}
DECIDED = {"event": "decided", "attempt": 0, "decision": "requeue", "reason": "saved and left"}
REQUEUED = {"event": "requeued", "attempt": 0}
AGAIN = {"event": "started", "attempt": 1, "world_size": 2}
HEARD = [{"rank": rank, "host": f"n{rank}", "heard": "SIGUSR2", "steps": 31} for rank in range(2)]
CASES = [
    ("all", [STARTED, DECIDED, REQUEUED, AGAIN], HEARD, [True, True, True], "ran again"),
    ("one is deaf", [STARTED, DECIDED, REQUEUED, AGAIN], [HEARD[0], {**HEARD[1], "heard": None}], [False, True, True], "not: rank 1 on n1"),
    ("another signal", [STARTED, DECIDED, REQUEUED, AGAIN], [HEARD[0], {**HEARD[1], "heard": "SIGTERM"}], [False, True, True], "1 of 2 ranks heard"),
    ("its own clock", [STARTED, DECIDED, REQUEUED, AGAIN], [{**word, "heard": "TIME"} for word in HEARD], [False, True, True], "0 of 2 ranks"),
    ("another step", [STARTED, DECIDED, REQUEUED, AGAIN], [HEARD[0], {**HEARD[1], "steps": 32}], [True, False, True], "31, 32"),
    ("one left no word", [STARTED, DECIDED, REQUEUED, AGAIN], HEARD[:1], [False, False, True], "1 left no word"),
    ("not requeued", [STARTED, {**DECIDED, "decision": "fail", "reason": "may not"}], HEARD, [True, True, False], "fail: may not"),
    ("never back", [STARTED, DECIDED, REQUEUED], HEARD, [True, True, False], "did not come back (CANCELLED)"),
    ("never started", [], [], [False], "no rank was started (CANCELLED)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "events", "words", "proved", "said"), CASES, ids=[case[0] for case in CASES])
def test_only_what_was_seen_is_proved(
    tmp_path: Path, name: str, events: list[dict[str, Any]], words: list[dict[str, Any]], proved: list[bool], said: str
) -> None:
    run = run_of(tmp_path, *[dict(event) for event in events], words=words)
    found = noticeproof.verdicts(noticeproof.read(run, "USR2", None if name == "all" else "CANCELLED"))
    assert [good for good, _ in found] == proved and said in "\n".join(text for _, text in found), found
