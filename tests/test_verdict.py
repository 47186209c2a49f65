"""The verdict: why an end was no success, who failed first, what comes next, and where to look further."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from steps import Step, step_environ

from hpc.allocation.policy import Action, Decision, Ending, Limits, decide
from hpc.allocation.verdict import End, Verdict, cause_of, next_of
from hpc.login.logs import Asked, Logs
from hpc.node.memory import _in_kernel_log
from hpc.node.outcome import Failure, alike, read_traceback
from hpc.rundir import RunDirectory
from hpc.slurm.states import JobState


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    with Step(tmp_path) as running:
        yield running


def first(**changes: Any) -> dict[str, Any]:
    return Failure(**{"rank": 2, "host": "n1", "code": 1, "time": 1.0, "message": "ValueError: x", **changes}).to_dict()


FAILED = first()
GONE = first(code=69, message="the agent on n2 is gone: its node was lost, or the agent was killed")
MEETING = first(rank=-1, code=69, message="rank 0 on n1: ranks 4-7 (node n2) never arrived within 600 s: look whether")


@pytest.mark.parametrize(
    ("cause", "end", "ending"),
    [
        ("exception", {"first": FAILED}, {}),
        ("exited 42", {"code": 42, "first": first(code=42, message="exited 42")}, {}),
        ("killed by SIGSEGV", {"code": 139, "first": first(code=139, message="killed by SIGSEGV")}, {}),
        ("out of memory", {"code": 137, "first": first(code=137, oom="out of memory: the memory cgroup's limit")}, {}),
        ("out of memory", {"first": first(message="OutOfMemoryError: CUDA out of memory. Tried to allocate")}, {}),
        ("out of memory", {"first": first(message="MemoryError: ")}, {}),
        ("hang", {"code": 124, "first": first(code=124, hung=True)}, {"hung": "rank 2 on n1 hung"}),
        ("node lost", {"code": 69, "first": GONE}, {"lost_nodes": ("n2",)}),
        ("node lost", {"code": 69, "first": {**GONE, "silent": True}}, {}),
        ("an agent or its node lost", {"code": 69, "first": GONE}, {}),
        ("rendezvous failed", {"code": 69, "first": MEETING, "started": False}, {"started": False}),
        ("rendezvous failed", {"code": 69, "first": first(code=69, message="RendezvousError: rank 0 ...")}, {}),
        ("never started", {"code": 1, "started": False}, {"started": False}),
        ("a contradiction in the environment", {"code": 78, "started": False}, {"started": False}),
        ("cancelled", {"code": 143, "first": first(by_us=True)}, {"state": JobState.CANCELLED, "notice": "SIGTERM"}),
        ("cancelled", {"code": 143, "first": first(by_us=True)}, {"state": JobState.COMPLETING, "notice": "SIGTERM"}),
        ("out of time", {"code": 143, "first": first(by_us=True)}, {"notice": "the time limit", "by_us": True}),
        ("out of time", {"code": 75}, {"cut_short": "the time limit"}),
        ("preempted", {"code": 75}, {"preempted": True, "notice": "SIGTERM"}),
        ("ended by SIGUSR2", {"code": 140}, {"notice": "SIGUSR2", "notice_signals": (15, 12)}),
        ("stopped at the keyboard", {"code": 130}, {"keyboard": True}),
        ("a data-loader process killed", {"first": {**FAILED, "loader_killed": "Killed"}}, {}),
        ("lost with its step", {"code": 9, "reported": False}, {"reported": False}),
    ],
)
def test_each_cause_has_its_words(cause: str, end: dict[str, Any], ending: dict[str, Any]) -> None:
    whole = End(**{"code": 1, "started": True, "reported": True, **end})
    assert cause_of(whole, Ending(code=whole.code, **ending)) == cause


def test_what_comes_next_is_what_was_decided() -> None:
    killed = Ending(code=137)
    assert next_of(decide(killed, Limits()), 137, local=False) == "started again inside this allocation in 2 s"
    assert (
        next_of(decide(killed, Limits(max_restarts=0)), 137, local=False) == "given up, the job ends with exit code 137"
    )
    assert next_of(Decision(action=Action.REQUEUE, reason=""), 75, local=False) == "back into the queue"


def test_other_ranks_that_say_the_same_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "Traceback (most recent call last):\n  File a\n"
    failures = [
        Failure(
            rank=n, host="n1", code=1, time=n, message=f"E: peer 10.0.0.{n}", traceback=f"{trace}E: peer 10.0.0.{n}"
        )
        for n in range(6)
    ]
    failures.append(Failure(rank=6, host="n2", code=1, time=9, message="KeyError: 'x'"))
    groups = alike(failures[0], failures[1:])
    assert [(group["ranks"], group["count"], group["same"]) for group in groups] == [("1-5", 5, True), ("6", 1, False)]
    end = End(code=1, started=True, reported=True, first=failures[0].to_dict(), others=6, alike=groups)
    verdict = Verdict(
        end=end, cause="exception", attempt=1, restart=2, folder=tmp_path / "attempt-1", comes_next="given up"
    )
    verdict.tell()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("hpc.launch: verdict: exception, first in rank 0 on n1, attempt 1, restart 2, at ")
    assert lines[2:4] == ["hpc.launch:   ranks 1-5: the same", "hpc.launch:   rank 6: KeyError: 'x'"]
    assert lines[4] == f"hpc.launch: next: given up; look further: python -m hpc.logs {tmp_path} --attempt 1 --rank 0"
    assert lines[-1].startswith("hpc.launch: rank 0 on n1, attempt 1, restart 2: exited 1: E: peer 10.0.0.0")
    assert json.loads(json.dumps(verdict.event()))["alike"] == groups
    replace(verdict, cause="hang").tell()
    assert capsys.readouterr().err.splitlines()[1].startswith("hpc.launch: 6 other ranks made no step either; logs in ")


FAIL = """
import os, pathlib, time
rank = os.environ["RANK"]
if rank == "3":
    print("rank 3 goes on", flush=True)
    time.sleep(600)
pathlib.Path("ready" + rank).touch()
while not all(os.path.exists("ready" + other) for other in "012"):
    time.sleep(0.01)
time.sleep(0.0 if rank == "2" else 0.15)
raise ValueError("bad batch 17")
"""


def launch(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environ = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "HPC_SITE_CONFIG": "", **changes}
    argv = [sys.executable, "-m", "hpc.launch", "--local", *words]
    return subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=150, check=False)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    (file,) = (folder / "runs").rglob("record.jsonl")
    return [event for event in map(json.loads, file.read_text().splitlines()) if event["event"] == kind]


@pytest.mark.slow
def test_f10_the_verdict_of_an_exception_in_several_ranks(tmp_path: Path) -> None:
    """Fresh interpreters, which write no error file: the traceback is the last thing in the rank's log."""
    (tmp_path / "train.py").write_text(FAIL)
    done = launch(tmp_path, "launch.workers_per_node=4", "launch.fork=false", "--", "train.py")
    (verdict,) = events(tmp_path, "verdict")
    assert done.returncode == 1, done.stderr
    assert verdict["cause"] == "exception" and verdict["rank"] == 2 and verdict["message"] == "ValueError: bad batch 17"
    groups = [(group["ranks"], group["same"]) for group in verdict["alike"]]
    assert groups in ([("0,1", True)], [("0", True)], [("1", True)], []), done.stderr  # who is late is ended
    assert abs(verdict["first_time"] - time.time()) < 150 and "line 11, in <module>" in verdict["traceback"]
    lines = done.stderr.rstrip().splitlines()
    assert all(f"{ranks}: the same" in done.stderr for ranks, _ in groups) and lines[-2] == "ValueError: bad batch 17"
    assert "rank 2 on" in lines[-1] and "bad batch 17" in lines[-1] and "rank-2.log" in lines[-1]
    assert "next: given up, the job ends with exit code 1; look further: python -m hpc.logs " in done.stderr


AHEAD = "import runpy, sys, time; real = time.time; time.time = lambda: real() + 3600; runpy.run_module('hpc.node', run_name='__main__', alter_sys=True)"
ONE_AFTER_THE_OTHER = """
import os, pathlib, sys, time
if os.environ["RANK"] == "0":
    while not os.path.exists("begun"):
        time.sleep(0.01)
    time.sleep(1.0)
    print("then rank 0", flush=True)
    time.sleep(1.0)
    pathlib.Path("go on").touch()
    while not os.path.exists("failed"):
        time.sleep(0.01)
    time.sleep(0.15)
    sys.exit(4)
print("first rank 1", flush=True)
pathlib.Path("begun").touch()
while not os.path.exists("go on"):
    time.sleep(0.01)
print("last rank 1", flush=True)
pathlib.Path("failed").touch()
sys.exit(3)
"""


@pytest.mark.slow
def test_clocks_of_nodes_may_differ_by_an_hour(step: Step) -> None:
    """The second node's clock is ahead. Its rank fails first, and is the first by the clock of rank zero's node.

    What the ranks print is merged by that clock, too.
    """
    (step.folder / "train.py").write_text(ONE_AFTER_THE_OTHER)
    (step.folder / "run" / "attempt-0").mkdir(parents=True)
    arguments = ("--no-fork", "--workers-per-node", "1", "--allow-loopback", "--", "train.py")
    for task, code in enumerate(
        ("import runpy; runpy.run_module('hpc.node', run_name='__main__', alter_sys=True)", AHEAD)
    ):
        environ = step_environ(task, tasks_per_node=(1, 1))
        environ |= {"HPC_RUN_DIR": str(step.folder / "run"), "HPC_ATTEMPT": "0", "HPC_SECRET": "s" * 32}
        step.start([sys.executable, "-c", code, *arguments], environ)
    ended = step.ends()
    found = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert found["first"]["rank"] == 1 and found["code"] == 3, [one.stderr for one in ended]
    assert abs(found["first"]["time"] - time.time()) < 200
    said: list[str] = []
    Logs(RunDirectory(step.folder / "run"), Asked(), said.append).show(final=True)
    assert [line.rpartition("] ")[2] for line in said[-3:]] == ["first rank 1", "then rank 0", "last rank 1"], said


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup (version 1) with a limit, for a process to move into."""
    group = Path(f"/sys/fs/cgroup/memory/hpc-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError:
        pytest.skip("needs a memory cgroup of version 1")
    yield group
    deadline = time.monotonic() + 10
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_out_of_memory_is_told_from_the_cgroup(step: Step, small_memory: Path) -> None:
    (step.folder / "train.py").write_text("import os\nx = bytearray((600 if os.environ['RANK'] == '1' else 1) << 20)\n")
    (step.folder / "run" / "attempt-0").mkdir(parents=True)
    environ = step_environ(0, tasks_per_node=(1,))
    environ |= {"HPC_RUN_DIR": str(step.folder / "run"), "HPC_ATTEMPT": "0"}
    agent = [sys.executable, "-m", "hpc.node", "--no-fork", "--workers-per-node", "2", "--", "train.py"]
    step.start(["sh", "-c", f'echo $$ > {small_memory}/cgroup.procs && exec "$@"', "sh", *agent], environ)
    (ended,) = step.ends()
    found = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())["first"]
    assert ended.code == 137 and found["rank"] == 1, ended.stderr
    assert found["message"].startswith(
        "killed by SIGKILL, out of memory: the memory cgroup's limit of 300 MiB was reached"
    )
    assert found["oom"] and found["rank"] == 1
    kills = re.findall(r"Killed process (\d+) \(", subprocess.run(["dmesg"], capture_output=True, text=True).stdout)
    if kills:  # where its log may be read, the kernel says so too
        line = _in_kernel_log(int(kills[-1]), time.monotonic() - 120)
        assert line is not None and "out of memory" in line
        assert _in_kernel_log(int(kills[-1]), time.monotonic() + 9) is None


def test_a_traceback_is_found_at_the_end_of_a_log_and_not_earlier(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    trace = "Traceback (most recent call last):\n  File 'a', line 1, in f\n    f()\nValueError: x\n"
    for text, message in [
        (f"step 1\n{trace}", "ValueError: x"),
        (f"{trace}bye\n", "ValueError: x"),
        (trace + "step\n" * 11, ""),
        ("step 1\n", ""),
        ("Traceback (most recent call last):\n", ""),
        (
            f"{trace}\nDuring handling of the above exception, another exception occurred:\n\n{trace.replace('x', 'y')}",
            "ValueError: y",
        ),
        ("", ""),
    ]:
        log.write_text(text)
        assert read_traceback(log)[0] == message, text
    assert read_traceback(tmp_path / "none") == ("", "")
