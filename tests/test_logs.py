"""`python -m hpc.logs`: the ranks' logs as one text, while they are written and afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc.errors import UsageError
from hpc.login.logs import Asked, Line, Logs, RankLog, collapse, error_lines, parse_ranks
from hpc.node import streams
from hpc.rundir import RunDirectory

TALK = """
import os, sys, time
rank, restart = int(os.environ["RANK"]), os.environ["HPC_RESTART"]
print("epoch 1 begins")
print("\\x1b[31mred\\x1b[0m", rank)
time.sleep(1.2)
for state in range(3):
    sys.stdout.write(f"\\r{state} of 2")
sys.stdout.write("\\n")
if rank == 1 and restart == "0":
    open("talked", "w").close()
    os.kill(os.getpid(), 9)
if restart == "0":
    time.sleep(600)
time.sleep(0.3 * rank)
print("rank", rank, "is done")
for again in range(4):
    print("and again")
"""


def environ() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "HPC_SITE_CONFIG": ""}


def logs(*words: str, folder: Path) -> str:
    argv = [sys.executable, "-X", "importtime", "-m", "hpc.logs", *words]
    done = subprocess.run(argv, env=environ(), cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_logs_of_a_run_while_it_runs_and_when_it_is_over(tmp_path: Path) -> None:
    """A rank is killed in the first start; the follower goes on with the second, and ends with the run."""
    (tmp_path / "talk.py").write_text(TALK)
    words = [
        "--local",
        "launch.workers_per_node=3",
        "launch.fork=false",
        f"run_dir={tmp_path / 'run'}",
        "--",
        "talk.py",
    ]
    with open(tmp_path / "screen", "w") as screen:
        argv = [sys.executable, "-m", "hpc.launch", *words]
        run = subprocess.Popen(argv, env=environ(), cwd=tmp_path, stdout=screen, stderr=screen)
    try:
        while not (tmp_path / "run" / "attempt-0").exists():
            assert run.poll() is None, (tmp_path / "screen").read_text()
        argv = [sys.executable, "-m", "hpc.logs", "-f", "run"]
        done = subprocess.run(
            argv, env=environ(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert run.wait(60) == 0, (tmp_path / "screen").read_text()
    finally:
        run.kill()
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    lines = logs("run", folder=tmp_path).splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("==== attempt 0")]
    assert len(heads) == 2 and "restart 1" in lines[heads[1]] and f"on {host}" in lines[0]
    first, second = lines[: heads[1]], lines[heads[1] :]
    for part in (first, second):
        assert f"[ranks 0-2 {host}] epoch 1 begins" in part and f"[ranks 0-2 {host}] 2 of 2" in part
        assert not any("0 of 2" in line for line in part)
        assert f"[rank 1 {host}] \\x1b[31mred\\x1b[0m 1" in part
    order = [line for line in second if "is done" in line or "again" in line]
    assert f"[rank 0 {host}] rank 0 is done" in order and f"[rank 2 {host}] rank 2 is done" in order
    assert "and again  (x 4)" in order[-1]
    assert {line for line in done.stdout.splitlines() if "==== attempt" in line} == {lines[at] for at in heads}
    assert sum("epoch 1 begins" in line for line in done.stdout.splitlines()) >= 2
    only = logs("run", "--rank", "2", folder=tmp_path)
    assert "rank 2 is done" in only and "rank 1" not in only
    errors = logs("run", "--errors", folder=tmp_path)
    assert errors.startswith(f"==== attempt 0: killed by SIGKILL, first in rank 1 on {host} ====")
    assert "next: started again inside this allocation in 2 s" in errors


def written(run: RunDirectory, attempt: int, texts: dict[int, bytes]) -> None:
    run.attempt(attempt).mkdir(exist_ok=True)
    for rank, text in texts.items():
        log = streams.open_log(run.attempt(attempt), rank)
        assert log is not None
        log.write(text)
        log.close()


def test_attempts_follow_each_other_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path), list[str]()
    logs = Logs(run, Asked(), said.append)
    run.append_event("started", attempt=0, job_id="7", nodes=[["n1", 0, 1], ["n2", 1, 1]])
    written(run, 0, {0: b"one\ntw", 1: "é\n".encode()})
    logs.show(final=False)
    assert said[0].endswith("on n1, n2, job 7 ====") and sorted(said[1:]) == ["[rank 0 n1] one", "[rank 1 n2] é"]
    del said[:]
    written(run, 0, {0: b"o\r\nthree"})
    logs.show(final=False)
    assert said == ["[rank 0 n1] two"]
    run.append_event("started", attempt=1, job_id="7", nodes=[["n3", 0, 2]])
    written(run, 1, {0: b"four\n", 1: b"four\n\xff\n"})
    del said[:]
    logs.show(final=False)
    assert said[0] == "[rank 0 n1] three" and said[1].startswith("==== attempt 1, began ")
    assert said[2:] == ["[ranks 0,1 n3] four", "[rank 1 n3] \\xff"]
    assert not logs.show(final=True)


def entries(*lines: tuple[float, int, str]) -> list[str]:
    return [entry.shown({}) for entry in collapse(Line(*line) for line in lines)]


def test_what_ranks_say_together_is_one_line_and_each_ranks_order_is_kept() -> None:
    assert entries((0, 0, "a"), (0, 1, "a"), (0.1, 2, "a"), (0.1, 2, "a")) == ["[ranks 0-2] a  (x 2)"]
    assert entries((0, 0, "b"), (0, 0, "a"), (0, 1, "a"), (0, 1, "b")) == [
        "[rank 0] b",
        "[ranks 0,1] a",
        "[rank 1] b",
    ]
    assert entries((0, 0, "a"), (5, 1, "a")) == ["[rank 0] a", "[rank 1] a"]  # not together


def test_a_log_without_times_and_one_with_damaged_times_are_read(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"x" * 20_000 + b"\nend")
    (tmp_path / "rank-0.times").write_bytes(b"nonsense\n12.5 0\n13 many\n14.0 20001\n15")
    lines = list(RankLog(tmp_path / "rank-0.log", 0, 1.0).lines(final=True))
    assert [(line.time, len(line.text)) for line in lines] == [(12.5, 8192), (12.5, 8192), (12.5, 3616), (14.0, 3)]
    (tmp_path / "rank-0.times").unlink()
    assert next(RankLog(tmp_path / "rank-0.log", 0, 1.0).lines(final=False)).time == 1.0
    assert list(RankLog(tmp_path / "none.log", 0, 1.0).lines(final=True)) == []


def test_errors_of_ranks_that_still_run_are_told_together(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt(0).mkdir()
    for rank in range(3):
        message = {
            "message": "ValueError: x" if rank else "KeyError",
            "extraInfo": {"py_callstack": f"trace {rank > 0}"},
        }
        (run.attempt(0) / f"error-{rank}.json").write_text(json.dumps({"message": message}))
    lines = list(error_lines(run, Asked()))
    assert lines == ["==== attempt 0: rank 0 ====", "trace False", "==== attempt 0: ranks 1,2 ====", "trace True"]


def test_ranks_are_numbers_and_ranges() -> None:
    assert parse_ranks("3") == {3} and parse_ranks("0-2, 7") == {0, 1, 2, 7}
    for text in ("", "a", "3-1", "1,,2", "-1"):
        with pytest.raises(UsageError, match="0-3,7"):
            parse_ranks(text)


def test_no_run_is_told_in_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hpc.logs", str(tmp_path)]
    done = subprocess.run(argv, env=environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "has no logs of ranks" in done.stderr


def test_a_damaged_record_is_no_reason_to_show_nothing(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path), list[str]()
    for nodes in (5, [["n1", 10**17, 3], ["n2", 0, -1], [[], {}, None]], {"a": 1}):
        run.append_event("started", attempt=0, nodes=nodes, job_id=["\x1b"], restart="x")
    for verdict in (
        {"rank": [1], "alike": [5, {"ranks": {}}]},
        {"rank": 2, "traceback": 7, "alike": "x", "next": None},
    ):
        run.append_event("verdict", attempt=0, **verdict)
    with open(run.record_file, "a") as record:
        record.write(
            '{"time": 1e300, "event": "started", "attempt": 0, "restart": 9}\n{"event": "verdict", "attempt": []}\n'
        )
    written(run, 0, {0: b"one\n"})
    Logs(run, Asked(), said.append).show(final=True)
    assert any(line.endswith("] one") for line in said) and not any("\x1b" in line for line in said)
    assert len(list(error_lines(run, Asked()))) > 4 and not list(error_lines(run, Asked(ranks=frozenset({5}))))
