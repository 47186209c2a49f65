"""sbin/bench: its command line, the form of its rows, and how it tells of a missed goal. No time is judged here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "sbin" / "bench.d" / "parts"))

from frame import Row, alternating, compared, table  # noqa: E402


def bench(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HPC_PYTHON": sys.executable}
    argv = [sys.executable, str(ROOT / "sbin" / "bench"), *map(str, words)]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=150, check=False)


def test_help_names_the_benchmarks() -> None:
    done = bench("--help")
    assert done.returncode == 0
    assert "start" in done.stdout and "--quick" in done.stdout


@pytest.mark.parametrize("words", [["begin"], ["start", "--only", "no such row"], ["start", "--turns", "0"]])
def test_an_unknown_name_is_one_line_with_what_there_is(words: list[str]) -> None:
    done = bench(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and ("start" in done.stderr or "1 or more" in done.stderr)


@pytest.mark.slow
def test_rows_as_json(tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    done = bench("start", "--quick", "--only", "host list", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 4
    for row in rows:
        assert set(row) == {"what", "against", "ratio", "goal", "met", "ours_s", "theirs_s", "reason"}
        assert row["what"] in done.stdout and row["against"]
        assert row["met"] is (row["ratio"] <= row["goal"])
        assert row["ratio"] == pytest.approx(row["ours_s"] / row["theirs_s"]) if row["theirs_s"] else row["ratio"] == 0


def test_a_missed_goal_is_shown_with_its_reason_and_a_met_one_without() -> None:
    missed = compared("launch", "rival", [3.0, 5.0, 4.0], [2.0, 2.0, 9.0], 1.05, "imports take 3 s")
    met = compared("submit", "rival", [1.0], [2.0], 1.0, "not to be seen")
    counted = Row(what="look-ups", against="counted", ratio=2, goal=0)
    shown = table([missed, met, counted])
    assert "MISSED" in shown and "reason: imports take 3 s" in shown and "reason: not looked into" in shown
    assert "not to be seen" not in shown and met.to_json()["reason"] == ""
    assert missed.to_json() | {"ratio": 2.0, "goal": 1.05, "met": False, "ours_s": 4.0} == missed.to_json()
    assert shown.endswith("1 of 3 goals met")


def test_no_goal_no_verdict() -> None:
    row = Row(what="x", against="y", ratio=9.0, goal=None)
    assert row.to_json()["met"] is None
    assert "MISSED" not in table([row])


def test_contestants_alternate() -> None:
    assert alternating("ABC", 3) == list("ABCCBAABC")
