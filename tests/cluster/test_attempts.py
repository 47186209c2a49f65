"""Attempts on the real Slurm: preempted, requeued by hand, cancelled, killed and failed jobs, each ending as it should."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import FIRST_USER, Rig, give_to

# Keeps its own progress; saves and leaves with 75 on a notice, all ranks at a step of their own.
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
heard = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: heard.append(n))
rank, total = os.environ["RANK"], int(sys.argv[1])
saved = Path(f"progress-{rank}")
step = int(saved.read_text()) if saved.exists() else 0
print("BEGIN", rank, step, os.getpid(), flush=True)
while step < total:
    step += 1
    time.sleep(0.1)
    print("STEP", rank, step, flush=True)
    if heard or "often" in sys.argv:
        saved.write_text(str(step))
    if heard:
        print("SAVED", rank, step, flush=True)
        sys.exit(75)
print("FINISHED", rank, step, flush=True)
"""


class Run:
    """One submitted run in a folder of its own."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder, self.job_id, self.path = rig, folder, "", Path()
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        give_to(folder, FIRST_USER)

    def submit(self, *words: str) -> None:
        argv = [self.rig.python, "-m", "hpc.submit", *words]
        done = self.rig.run(argv, cwd=self.folder, env=self.environ, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        (self.job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        (path,) = re.findall(r"^ +directory +(.*)$", done.stdout, re.MULTILINE)
        self.path = Path(path)
        self.rig.track(self.job_id)

    @property
    def environ(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.rig.clone), "HPC_SITE_CONFIG": ""}

    @property
    def text(self) -> str:
        file = self.path / f"slurm-{self.job_id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, text: str, count: int = 1, limit_s: float = 90) -> None:
        deadline = time.monotonic() + limit_s
        while self.text.count(text) < count:
            assert time.monotonic() < deadline, self.text + self.rig.report(self.job_id)
            time.sleep(0.2)

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = map(json.loads, (self.path / "record.jsonl").read_text().splitlines())
        return [event for event in events if event["event"] == kind]

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.events("decided")]

    def steps_of(self, rank: int) -> list[int]:
        return [int(step) for step in re.findall(rf"STEP {rank} (\d+)", self.text)]


@pytest.fixture
def run(cluster: Rig, request: pytest.FixtureRequest) -> Iterator[Run]:
    yield Run(cluster, cluster.home() / f"work {request.node.name[:40]} {time.time_ns()}")


def preempt(run: Run) -> None:
    """A job in the partition `high` takes both nodes for some seconds."""
    run.rig.sbatch(
        "--partition=high", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap", "sleep 3", cwd=run.folder
    )


WHOLE = ("--partition", "low", "--nodes", "2", "--gpus-per-node", "4")
ONE = ("--partition", "low", "--nodes", "1", "--gpus-per-node", "2")


def test_a_preempted_job_comes_back_and_loses_no_step(run: Run) -> None:
    run.submit(*WHOLE, "--", "train.py", "150")
    run.wait_for("STEP 7 10\n")
    preempt(run)
    assert run.rig.wait(run.job_id, timeout=150) == "COMPLETED", run.rig.report(run.job_id)
    assert run.text.count("FINISHED") == 8
    for rank in range(8):
        assert run.steps_of(rank) == list(range(1, 151))
    assert run.decisions() == ["requeue"] and len(run.events("requeued")) == 1
    assert "preemption" in run.events("decided")[0]["reason"] and "fail" not in run.text
    assert run.rig.job(run.job_id)["Restarts"] == "1"


def test_a_program_without_handlers_comes_back_too(run: Run) -> None:
    (run.folder / "plain.py").write_text(
        "import os, time\nprint('BEGIN', flush=True)\ntime.sleep(300 if os.environ['HPC_ATTEMPT'] == '0' else 0)\n"
    )
    run.submit(*WHOLE, "--", "plain.py")
    run.wait_for("BEGIN", 8)
    preempt(run)
    assert run.rig.wait(run.job_id, timeout=150) == "COMPLETED", run.rig.report(run.job_id)
    assert run.text.count("BEGIN") == 16


def test_requeue_by_hand_comes_back_once(run: Run) -> None:
    run.submit(*ONE, "--", "train.py", "60", "often")
    run.wait_for("STEP 1 10\n")
    run.rig.slurm("scontrol", "requeue", run.job_id)
    assert run.rig.wait(run.job_id, timeout=120) == "COMPLETED", run.rig.report(run.job_id)
    assert run.text.count("FINISHED") == 2 and run.rig.job(run.job_id)["Restarts"] == "1"
    assert not run.events("requeued")


def test_a_signal_to_the_steps_is_a_notice(run: Run) -> None:
    run.submit(*ONE, "--", "train.py", "60")
    run.wait_for("STEP 1 10\n")
    run.rig.slurm("scancel", "--signal=USR2", run.job_id)
    assert run.rig.wait(run.job_id, timeout=120) == "COMPLETED", run.rig.report(run.job_id)
    assert run.steps_of(0) == list(range(1, 61)) and run.decisions() == ["requeue"]


def test_a_program_without_handlers_comes_back_after_the_time_limit(run: Run) -> None:
    (run.folder / "plain.py").write_text(
        "import os, time\nprint('BEGIN', flush=True)\ntime.sleep(300 if os.environ['HPC_ATTEMPT'] == '0' else 0)\n"
    )
    run.submit(*ONE, "--time", "1", "slurm.signal_lead_s=5", "launch.grace_s=5", "--", "plain.py")
    assert run.rig.wait(run.job_id, timeout=200) == "COMPLETED", run.rig.report(run.job_id)
    assert run.text.count("BEGIN") == 4 and run.decisions() == ["requeue"]
    assert "left of the time limit: SIGTERM to the step" in run.text and run.rig.job(run.job_id)["Restarts"] == "1"


def test_scancel_stays_cancelled(run: Run) -> None:
    run.submit(*ONE, "--", "train.py", "600")
    run.wait_for("STEP 1 5\n")
    run.rig.slurm("scancel", run.job_id)
    assert run.rig.wait(run.job_id, timeout=60) == "CANCELLED"
    time.sleep(8)  # longer than a requeued job waits here
    job = run.rig.job(run.job_id)
    assert job["JobState"] == "CANCELLED" and job["Restarts"] == "0"
    assert not run.events("requeued") and run.text.count("BEGIN") == 2


def test_kill_9_of_a_worker_starts_again_inside_the_allocation(run: Run) -> None:
    run.submit(*ONE, "--", "train.py", "60", "often")
    run.wait_for("STEP 1 10\n")
    (found,) = re.findall(r"BEGIN 1 0 (\d+)", run.text)
    os.kill(int(found), signal.SIGKILL)  # the nodes' processes live on this machine
    assert run.rig.wait(run.job_id, timeout=120) == "COMPLETED", run.rig.report(run.job_id)
    job = run.rig.job(run.job_id)
    assert job["Restarts"] == "0" and run.text.count("FINISHED") == 2 and run.decisions() == ["again"]
    assert [event["attempt"] for event in run.events("started")] == [0, 0]
    assert "rank 1 on" in run.text and "restart 1 of 3, in 2 s" in run.text


def test_kill_9_of_an_agent_starts_again_too(run: Run) -> None:
    run.submit(*WHOLE, "--", "train.py", "60", "often")
    run.wait_for("STEP 7 10\n")
    agents = [
        p for p in run.rig.processes_of(FIRST_USER) if "-m hpc.node" in p.command and p.node == run.rig.node_names[1]
    ]
    os.kill(min(agent.pid for agent in agents), signal.SIGKILL)
    assert run.rig.wait(run.job_id, timeout=120) == "COMPLETED", run.rig.report(run.job_id)
    assert run.text.count("FINISHED") == 8 and run.decisions() == ["again"]


def test_q18_an_exception_fails_at_once_and_once(run: Run) -> None:
    (run.folder / "bad.py").write_text("raise ValueError('bad batch 17')\n")
    run.submit(*ONE, "--", "bad.py")
    assert run.rig.wait(run.job_id, timeout=60) == "FAILED"
    assert run.rig.job(run.job_id)["Restarts"] == "0" and len(run.events("started")) == 1
    assert run.decisions() == ["fail"] and "bad batch 17" in run.text.splitlines()[-1]


@pytest.mark.parametrize(("by_itself", "element"), [(True, None), (False, None), (True, "3")])
def test_where_the_job_may_not_be_requeued_a_new_one_goes_on_once(
    run: Run, by_itself: bool, element: str | None
) -> None:
    more = ["launch.resubmit=true"] if by_itself else []
    more += [f"slurm.extra.array={element}"] if element else []
    run.submit(*ONE, "slurm.requeue=false", *more, "--", "train.py", "60")
    suffix = f"_{element}" if element else ""
    whole, run.job_id = run.path, run.job_id + suffix
    run.wait_for("STEP 1 10\n")
    run.rig.slurm("scancel", "--signal=TERM", run.job_id)
    assert run.rig.wait(run.job_id, timeout=60) == "FAILED" and run.rig.job(run.job_id)["ExitCode"] == "75:0"
    path = whole / f"array-{element}" if element else whole
    if by_itself:
        (second,) = re.findall(r"may not be requeued, so it goes on as job (\w+)", run.text)
        command = f"-m hpc.submit --continue {shlex.quote(str(path))}"
    else:
        (command,) = re.findall(r"may not be requeued, go on with: python (.*)", run.text)
        done = run.rig.run(["sh", "-c", f"'{run.rig.python}' {command}"], cwd=run.folder, env=run.environ)
        assert done.returncode == 0, done.stdout + done.stderr
        (second,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
    run.rig.track(second.removesuffix(suffix))
    again = run.rig.run(["sh", "-c", f"'{run.rig.python}' {command}"], cwd=run.folder, env=run.environ)
    assert again.returncode == 2 and "submitted" not in again.stdout, again.stderr
    assert run.rig.wait(second, timeout=90) == "COMPLETED", run.rig.report(second)
    text = run.text + (whole / f"slurm-{second}.out").read_text()
    assert [int(step) for step in re.findall(r"STEP 0 (\d+)", text)] == list(range(1, 61))
    assert len(list((run.folder / "runs").iterdir())) == 1
    run.path = path
    assert [event["attempt"] for event in run.events("started")] == [0, 1]
