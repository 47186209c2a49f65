"""The controller is killed, and another one goes on; signals come once by whatever way. Slurm is a stand-in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from steps import ROOT
from test_requeue import Controller

from hpc.allocation import warden

KILLED = "the controller was killed by SIGKILL, perhaps out of host memory"
CONTROLLER = """
import os, signal, sys, time
from hpc.allocation import warden

ward = warden.stand(sys.argv[1:], os.environ)
past = ward.past and (ward.past.number, ward.past.standing, [signal.Signals(one).name for one in ward.past.heard])
time.sleep(float(os.environ.get("EARLY_S", "0")))
ward.listen([signal.SIGINT, signal.SIGTERM, signal.SIGUSR2], lambda number, _: print(signal.Signals(number).name))
if "STILLBORN" not in os.environ:
    ward.tell({"pid": os.getpid()})
print("ready", os.getpid(), os.getppid(), past)
while True:
    time.sleep(10)
"""


class Pair:
    """A warden and its controllers, which only tell what they hear."""

    def __init__(self, **environ: str) -> None:
        batch = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1", "PYTHONPATH": str(ROOT), **environ}
        argv = [sys.executable, "-u", "-c", CONTROLLER]
        self.warden = subprocess.Popen(argv, env=batch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.controller, self.past = self.ready()

    def line(self) -> str:
        assert self.warden.stdout is not None
        return self.warden.stdout.readline().rstrip("\n")

    def ready(self) -> tuple[int, str]:
        word, controller, warden, past = self.line().split(maxsplit=3)
        assert word == "ready" and int(warden) == self.warden.pid
        return int(controller), past

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.warden.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.controller, signal.SIGKILL)
        self.warden.communicate()


def test_a_signal_is_one_by_whatever_way_it_comes() -> None:
    with Pair() as pair:
        told = [
            ("SIGUSR2", [pair.warden.pid]),
            ("SIGUSR2", [pair.warden.pid]),
            ("SIGINT", [pair.controller]),
            ("SIGTERM", [pair.warden.pid, pair.controller]),
            ("SIGUSR2", [pair.warden.pid]),
        ]
        for name, pids in told:
            for pid in pids:
                os.kill(pid, signal.Signals[name])
            assert pair.line() == name


def test_the_next_controller_knows_what_the_killed_one_knew_and_heard() -> None:
    with Pair() as pair:
        os.kill(pair.warden.pid, signal.SIGUSR2)
        assert pair.line() == "SIGUSR2"
        first = pair.controller
        os.kill(first, signal.SIGKILL)
        second, past = pair.ready()
        assert past == f"(9, {{'pid': {first}}}, ['SIGUSR2'])"
        os.kill(second, signal.SIGSEGV)
        third, past = pair.ready()
        pair.controller = third
        assert past == f"(11, {{'pid': {second}}}, ['SIGUSR2'])" and len({first, second, third}) == 3
        os.kill(pair.warden.pid, signal.SIGQUIT)  # nobody listens to it: it does what it always does
        assert pair.warden.wait(20) == 128 + signal.SIGQUIT


def test_what_comes_before_the_controller_listens_is_kept() -> None:
    argv = [sys.executable, "-u", "-c", CONTROLLER]
    batch = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1", "PYTHONPATH": str(ROOT), "EARLY_S": "1.5"}
    with subprocess.Popen(argv, env=batch, stdout=subprocess.PIPE, text=True) as warden:
        assert warden.stdout is not None
        while not (children := psutil.Process(warden.pid).children()):
            time.sleep(0.01)
        warden.send_signal(signal.SIGTERM)
        assert warden.stdout.readline() == "SIGTERM\n" and warden.stdout.readline().startswith("ready ")
        warden.kill()
        assert warden.stdout.readline() == "SIGTERM\n"  # the controller hears that it is alone
        children[0].kill()


def test_controllers_that_are_killed_before_they_have_started_anything_end_the_job() -> None:
    with Pair(STILLBORN="yes") as pair:
        for _ in range(2):
            os.kill(pair.controller, signal.SIGKILL)
            pair.controller, past = pair.ready()
            assert past == "(9, None, [])"
        os.kill(pair.controller, signal.SIGKILL)
        assert pair.warden.wait(20) == 137
        assert pair.warden.stderr is not None and "as 2 before it" in pair.warden.stderr.read()


ENDING = """
import os, signal, sys, time
from hpc.allocation import warden

ward = warden.stand(sys.argv[1:], os.environ)
ward.listen([signal.SIGINT], print)

class Last:
    def __del__(self, kill=os.kill, told=[os.getppid(), os.getpid()], sleep=time.sleep):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            for pid in told:
                kill(pid, number)
        sleep(0.5)
        os.write(1, b"end")

last = Last()
if "retires" in sys.argv:
    ward.retire()
else:
    del Last.__del__.__defaults__[1][1]
sys.exit(3)
"""


@pytest.mark.parametrize(("word", "code", "said"), [("retires", 3, "end"), ("does not", 130, "")])
def test_a_signal_while_the_interpreter_ends_is_no_kill(word: str, code: int, said: str) -> None:
    """Its handlers are gone by then, and a second controller would go on with a job that is over."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ENDING, word], env=batch, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")


@pytest.mark.parametrize(
    ("argv", "environ"),
    [([], {}), ([], {"SLURM_JOB_ID": "7"}), (["--local"], {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1"})],
)
def test_outside_of_a_batch_step_there_is_no_warden(argv: list[str], environ: dict[str, str]) -> None:
    before = psutil.Process().children()
    ward = warden.stand(argv, environ)
    ward.tell({"nobody": "hears it"})
    assert ward.past is None and psutil.Process().children() == before


class Guarded(Controller):
    """A batch step: the warden, and the controllers under it."""

    def __init__(self, folder: Path, *arguments: str, **changes: str) -> None:
        super().__init__(folder, *arguments, **{"SLURM_TASK_PID": "1", **changes})

    def controller(self, *, instead_of: int = 0) -> psutil.Process:
        deadline = time.monotonic() + 30
        while True:
            found = [p for p in psutil.Process(self.process.pid).children() if "hpc.launch" in p.cmdline()]
            if found and found[0].pid != instead_of:
                return found[0]
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.02)


@pytest.mark.slow
def test_another_controller_goes_on_and_the_budget_ends_it(tmp_path: Path) -> None:
    lines = "echo re''ady $HPC_RESTART; exec sleep 60"
    others = set(psutil.Process().children(recursive=True))  # of the tests before
    job = Guarded(tmp_path, "launch.max_restarts=1", "--", "sh", "-c", lines)
    job.wait_for("ready 0")
    first = job.controller()
    first.kill()
    job.wait_for("ready 1")
    job.controller(instead_of=first.pid).kill()
    assert job.ends() == 137, job.text
    assert job.decisions() == ["again", "fail"] and not job.requeues()
    reasons = [event["reason"] for event in job.record() if event["event"] == "decided"]
    assert reasons == [f"{KILLED}, restart 1 of 1", f"{KILLED} after 1 restarts (launch.max_restarts)"]
    assert [event["cause"] for event in job.record() if event["event"] == "verdict"] == [KILLED.split(",")[0]] * 2
    assert [event["restart"] for event in job.record() if event["event"] == "ended"] == [0, 1]
    assert not set(psutil.Process().children(recursive=True)) - others


@pytest.mark.slow
def test_a_controller_that_is_killed_in_the_pause_before_a_restart_has_noted_the_end(tmp_path: Path) -> None:
    lines = "echo re''ady $HPC_RESTART; [ $HPC_RESTART != 0 ] || kill -9 $$"
    job = Guarded(tmp_path, "launch.max_restarts=1", "--", "sh", "-c", lines)
    job.wait_for("restart 1 of 1, in 2 s")
    job.controller().kill()
    assert job.ends() == 0, job.text
    assert job.decisions() == ["again", "again"]
    assert [(event["restart"], event["code"]) for event in job.record() if event["event"] == "ended"] == [
        (0, 137),
        (1, 0),
    ]


@pytest.mark.slow
def test_a_notice_that_the_killed_controller_has_heard_counts_for_the_next_one(tmp_path: Path) -> None:
    job = Guarded(tmp_path, "--", "sh", "-c", "trap '' USR2; echo re''ady; exec sleep 60")
    job.wait_for("ready")
    controller = job.controller()
    job.process.send_signal(signal.SIGUSR2)
    time.sleep(0.5)
    controller.kill()
    assert job.ends() == 75, job.text
    assert job.decisions() == ["requeue"] and job.requeues() == [["requeue", "7"]]
    assert f"{KILLED} after SIGUSR2; job 7 is back in the queue" in job.text
