"""Leftover processes on real ones: what is ended, and the decoys that never are."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from steps import ROOT

from hpc.node import processes
from hpc.node.belonging import Place, Standing, judge
from hpc.node.processes import Process
from hpc.node.sweep import Scope, Sweeper
from hpc.slurm.commands import LiveJob
from hpc.slurm.states import JobState

NODE = f"decoy{os.getpid()}"
OTHER_USER = 12345
OVER, LIVE, REQUEUED = "100", "200", "300"
JOBS = {
    LIVE: LiveJob(state=JobState.RUNNING, restarts=0),
    REQUEUED: LiveJob(state=JobState.RUNNING, restarts=2),
}
SQUEUE = f"""#!/bin/sh
printf '{LIVE} RUNNING 0 2026-01-01T00:00:00\\n{REQUEUED} RUNNING 2 2026-01-01T00:00:00\\n'
"""
SCONTROL = """#!/bin/sh
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""


def mark(job_id: str, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": job_id, "SLURMD_NODENAME": NODE, "SLURM_CLUSTER_NAME": "here", "SLURM_STEP_ID": "0", **more}


class Crowd:
    """Real processes that do nothing, each with an environment of its own."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def add(self, environ: Mapping[str, str], argv0: str = "sleep", **how: object) -> int:
        child = subprocess.Popen([argv0, "600"], executable="/bin/sleep", env=dict(environ), **how)  # type: ignore[call-overload]
        self.all.append(child)
        return child.pid

    def living(self, pids: list[int]) -> list[int]:
        ended = {child.pid for child in self.all if child.poll() is not None}
        return [pid for pid in pids if pid not in ended]

    def close(self) -> None:
        for child in self.all:
            child.kill()
            child.wait()


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    found = Crowd()
    yield found
    found.close()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that knows of two live jobs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def sweeper(own: Mapping[str, str] | None = None, scope: Scope = Scope()) -> Sweeper:
    return Sweeper({"SLURMD_NODENAME": NODE, "SLURM_CLUSTER_NAME": "here", **(own or {})}, scope, grace_s=1.0)


def decoys(crowd: Crowd, stack: ExitStack) -> dict[int, str]:
    """One of each kind that must live, by pid."""
    found = {
        crowd.add(mark(LIVE)): "the same user's other job",
        crowd.add(mark(LIVE), "jupyter-notebook"): "an interactive notebook of a live job",
        crowd.add(mark(REQUEUED, SLURM_RESTART_COUNT="2")): "a job id used again after a requeue",
        crowd.add(mark(REQUEUED)): "a step that was started from outside into a job that was requeued",
        crowd.add({}): "the same command",
        crowd.add({"SLURM_JOB_ID": OVER}): "salloc's shell: no node started it",
        crowd.add(mark(LIVE, HPC_MARK=f"{OVER}.0.0.ab")): "the mark of a job that submitted this one",
        crowd.add({**mark(OVER), "SLURMD_NODENAME": "elsewhere"}): "another node's",
        crowd.add({**mark(OVER), "SLURM_CLUSTER_NAME": "there"}): "another cluster's job of the same number",
        crowd.add(mark(OVER), "-bash"): "a login shell",
        crowd.add(mark("12 "), "sleep"): "no number of a job",
    }
    if os.getuid() == 0:
        found[crowd.add(mark(OVER), user=OTHER_USER, group=OTHER_USER)] = "another user's"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/sleep", ["sleep", "600"], mark(OVER))
    stack.callback(os.close, terminal)
    stack.callback(os.waitpid, pid, 0)
    stack.callback(os.kill, pid, signal.SIGKILL)
    found[pid] = "somebody at a terminal"
    return found


@pytest.mark.slow
def test_r2_no_wrong_kill_in_a_thousand_tries(crowd: Crowd, slurm: Path) -> None:
    """Sweeps for 36 leftovers each, among 104 decoys of 13 kinds."""
    with ExitStack() as stack:
        spared = {pid: kind for _ in range(8) for pid, kind in decoys(crowd, stack).items()}
        time.sleep(0.1)
        tries = ended = 0
        while tries < 1000:
            prey = [
                crowd.add(mark(OVER, SLURM_RESTART_COUNT=str(n % 3)), start_new_session=n % 2 == 0) for n in range(24)
            ]
            prey += [crowd.add(mark(REQUEUED, SLURM_RESTART_COUNT="1" if n % 2 else "0")) for n in range(12)]
            for child in crowd.all[-len(prey) :]:
                _until_exec(child.pid)
            sweep = sweeper()
            view = sweep.look(ask_gpus=False)
            assert {one.process.pid for one in view.leftovers} == set(prey)
            ended += len(sweep.end(view))
            assert crowd.living(prey) == []
            alive = {pid for pid in spared if processes.look_at(pid, os.stat(f"/proc/{pid}").st_uid)}
            assert alive == set(spared), [spared[pid] for pid in set(spared) - alive]
            tries += len(spared)
            assert sweep.look(ask_gpus=False).leftovers == []  # and once more is harmless
        assert ended == 36 * (tries // len(spared))


def _until_exec(pid: int) -> None:
    """Popen returns after the exec, but the kernel may still be filling the new environment in."""
    deadline = time.monotonic() + 10
    while (seen := processes.look_at(pid)) is None or seen.mark is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_nothing_is_ended_when_slurm_cannot_be_asked(crowd: Crowd, slurm: Path) -> None:
    pid = crowd.add(mark(OVER))
    _until_exec(pid)
    (slurm / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    sweep = sweeper()
    view = sweep.look(ask_gpus=False)
    assert [one.process.pid for one in view.unknown] == [pid] and not view.leftovers and not view.is_clean
    assert "Unable to contact" in view.notes[0]
    assert sweep.end(view) == [] and crowd.living([pid]) == [pid]


def test_what_the_own_job_left_is_known_without_slurm(crowd: Crowd, slurm: Path) -> None:
    (slurm / "squeue").write_text("#!/bin/sh\nexit 1\n")
    own = mark(LIVE, SLURM_RESTART_COUNT="1", HPC_MARK=f"{LIVE}.1.2.cd")
    before = [
        crowd.add(mark(LIVE, HPC_MARK=f"{LIVE}.0.0.ef")),
        crowd.add(mark(LIVE, SLURM_RESTART_COUNT="1", HPC_MARK=f"{LIVE}.1.1.ab")),
    ]
    beside = [
        crowd.add(own),
        crowd.add(mark(LIVE, SLURM_RESTART_COUNT="1")),
        crowd.add(mark(LIVE, SLURM_RESTART_COUNT="2")),
    ]
    for pid in (*before, *beside):
        _until_exec(pid)
    sweep = sweeper(own)
    view = sweep.look(ask_gpus=False)
    assert {one.process.pid for one in view.leftovers} == set(before)
    over = sweeper(mark(LIVE, SLURM_RESTART_COUNT="1"), Scope(over=f"{LIVE}.1.2.cd"))
    assert {one.process.pid for one in over.look(ask_gpus=False).leftovers} == {beside[0]}
    assert {process.pid for process in sweep.end(view)} == set(before)
    assert crowd.living(beside) == beside


def test_a_stopped_one_and_one_that_ignores_sigterm_are_ended(crowd: Crowd, slurm: Path, tmp_path: Path) -> None:
    deaf = subprocess.Popen(
        [sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"],
        env=mark(OVER), stdout=subprocess.PIPE,
    )  # fmt: skip
    crowd.all.append(deaf)
    assert deaf.stdout is not None and deaf.stdout.readline() == b"1\n"
    stopped = crowd.add(mark(OVER))
    _until_exec(stopped)
    os.kill(stopped, signal.SIGSTOP)
    parent = subprocess.Popen(  # a child of a leftover that has thrown the mark away
        ["sh", "-c", "env -i sleep 600 & echo $!; wait"], env={**mark(OVER), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
    )  # fmt: skip
    crowd.all.append(parent)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.1)
    sweep = sweeper()
    ended = {process.pid for process in sweep.end(sweep.look(ask_gpus=False))}
    assert ended >= {deaf.pid, stopped, parent.pid, child}
    for stream in (deaf.stdout, parent.stdout):
        stream.close()


# ---- a number that went to another process ---------------------------------------------------------------------------

REUSED = """
import os, signal, subprocess, sys, time
from dataclasses import replace
from hpc.node import processes
environ = {"SLURM_JOB_ID": "100", "SLURMD_NODENAME": "n", "SLURM_STEP_ID": "0"}
wrong = 0
for _ in range(20):
    first = subprocess.Popen(["sleep", "600"], env=environ, executable="/bin/sleep")
    while (seen := processes.look_at(first.pid)) is None or seen.mark is None:
        pass
    first.kill()
    first.wait()
    time.sleep(0.02)  # two clock ticks
    second = None
    for _ in range(50):
        with open("/proc/sys/kernel/ns_last_pid", "w") as stream:
            stream.write(str(seen.pid - 1))
        second = subprocess.Popen(["sleep", "600"], env=environ, executable="/bin/sleep")
        if second.pid == seen.pid:
            break
        second.kill()
        second.wait()
    assert second is not None and second.pid == seen.pid, "the number could not be had again"
    while (now := processes.look_at(second.pid)) is None or now.mark is None:
        pass
    assert now.mark == seen.mark and now.command == seen.command and now.started != seen.started
    for number in (signal.SIGTERM, signal.SIGKILL):
        wrong += processes.send(seen, number)
    wrong += second.poll() is not None
    assert processes.send(now, signal.SIGKILL)
    assert second.wait() == -9
print("wrong", wrong)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: a pid namespace in which a number is forced to come again")
def test_r2_a_number_that_went_to_another_process_is_left_alone() -> None:
    argv = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", REUSED]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "wrong 0\n"


# ---- judged by hand --------------------------------------------------------------------------------------------------


def process(**changes: object) -> Process:
    usual: dict[str, object] = {"pid": 5, "started": 9, "parent": 1, "session": 5, "terminal": False}
    usual |= {"command": ("python",), "mark": processes.mark_of(mark(OVER)), "tag": (), "cgroup_job": None}
    return Process(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "restarts", "standing"),
    [
        (None, 0, Standing.LEFTOVER),
        (LiveJob(state=JobState.RUNNING, restarts=0), 0, Standing.LIVE),
        (LiveJob(state=JobState.COMPLETING, restarts=0), 0, Standing.LIVE),
        (LiveJob(state=JobState.SUSPENDED, restarts=0), 0, Standing.LIVE),
        (LiveJob(state=JobState.UNKNOWN, restarts=0), 0, Standing.LIVE),
        (LiveJob(state=JobState.PENDING, restarts=1), 0, Standing.LEFTOVER),
        (LiveJob(state=JobState.RUNNING, restarts=3), 2, Standing.LEFTOVER),
        (LiveJob(state=JobState.RUNNING, restarts=3), 3, Standing.LIVE),
        (LiveJob(state=JobState.RUNNING, restarts=0), 1, Standing.LIVE),
    ],
)
def test_slurms_answer_decides(job: LiveJob | None, restarts: int, standing: Standing) -> None:
    place = Place(node=NODE, cluster="here", ancestors=frozenset(), own=None)
    one = process(mark=processes.mark_of(mark(OVER, SLURM_RESTART_COUNT=str(restarts))))
    assert judge(one, place, {OVER: job} if job else {}).standing is standing
    assert judge(one, place, None).standing is Standing.UNKNOWN
    assert judge(process(cgroup_job=LIVE), place, {}).standing is Standing.LIVE


@pytest.mark.parametrize(("began_s_ago", "standing"), [(3600.0, Standing.LIVE), (-3600.0, Standing.LEFTOVER)])
def test_a_step_that_tells_no_attempt_is_judged_by_its_age(began_s_ago: float, standing: Standing) -> None:
    place = Place(
        node=NODE, cluster="here", ancestors=frozenset(), own=processes.mark_of(mark(OVER, SLURM_RESTART_COUNT="1"))
    )
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
    jobs = {OVER: LiveJob(state=JobState.RUNNING, restarts=1, began=time.time() - began_s_ago)}
    assert judge(process(started=now), place, jobs).standing is standing
    waiting = {OVER: LiveJob(state=JobState.PENDING, restarts=1)}
    assert judge(process(started=now), place, waiting).standing is Standing.LIVE
