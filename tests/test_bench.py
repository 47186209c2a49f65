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
sys.path[:0] = [str(ROOT / "sbin" / "bench.d"), str(ROOT / "sbin" / "bench.d" / "parts")]

import race  # noqa: E402
import recover  # noqa: E402
from diary import Diary  # noqa: E402
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


def test_the_trace_of_faults_is_the_same_each_time_and_has_all_kinds() -> None:
    faults = race.trace(3600.0)
    assert faults == race.trace(3600.0) and race.trace(180.0) == faults[:3]
    gaps = [late.at_s - early.at_s for early, late in zip(faults, faults[1:], strict=False)]
    assert min(gaps) >= race.LEAST_GAP_S and 45 < sum(gaps) / len(gaps) < 75
    counts = {kind: sum(fault.kind == kind for fault in faults) for kind in race.KINDS}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_what_a_save_costs_is_told_from_the_steps_beside_it() -> None:
    seconds = [0.01] * 100
    seconds[50:55] = [0.03] * 5
    ends = [sum(seconds[: count + 1]) for count in range(100)]
    assert recover._cost(ends, ends[49], ends[54]) == pytest.approx(0.1)
    assert recover._cost([end * 1.7 for end in ends], ends[49] * 1.7, ends[54] * 1.7) == pytest.approx(0.17)
    assert recover._cost(ends, ends[2], ends[5]) is None


def test_a_diary_tells_starts_in_their_order_and_leaves_out_half_lines(tmp_path: Path) -> None:
    diary = Diary(tmp_path, 2)
    (tmp_path / "1-99.0.500").write_text("20.0 8\n20.5 9\n21.0 1")
    (tmp_path / "0-77.0.400").write_text("10.0 1\n11.0 2\n")
    (tmp_path / "0-77.1.401").write_text("10.1 1\n")
    (start,) = diary.starts()
    assert start.pids == {0: 400, 1: 401} and (start.began, start.first, start.last()) == (10.0, 1, 2)
    assert start.all_began(1) and not start.all_began(2) and start.last(before=10.5) == 1
    (tmp_path / "1-99.1.501").write_text("20.1 8\n")
    assert [start.name for start in diary.starts()] == ["0-77", "1-99"] and diary.starts()[1].last() == 9
