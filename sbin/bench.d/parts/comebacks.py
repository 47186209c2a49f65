"""Runs on the dev cluster that are killed, stopped or told to go, and the moments of what follows."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contestants import Floor
from frame import RIVALS, Bench, NotMeasured

LOOK_S = 0.02
LIMIT_S = 120.0


@contextlib.contextmanager
def drill(bench: Bench, *words: str) -> Iterator[Any]:
    """A submitted run of the tests' job, as tests/cluster/fault_rig.py drives it; its folder goes afterwards."""
    rig = bench.rig()
    import fault_rig

    run = fault_rig.new_drill(rig, "bench")
    try:
        run.submit(*words, f"slurm.setup=[\"date +%s.%N >> '{run.folder}/began'\"]")
        yield run
    except AssertionError as error:
        raise NotMeasured(str(error).strip().splitlines()[0][:200]) from None
    finally:
        rig.cancel_jobs()
        shutil.rmtree(run.folder, ignore_errors=True)


def moment(what: Callable[[], Any]) -> float:
    """The time at which it became so, to a fiftieth of a second.

    Raises:
        NotMeasured: it never did.
    """
    deadline = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > deadline:
            raise NotMeasured(f"waited for {LIMIT_S:.0f} s in vain")
        time.sleep(LOOK_S)
    return time.time()


def batch_began(run: Any, attempt: int = 0) -> float:
    """When the batch script of this attempt ran its first line."""
    file = run.folder / "began"
    moment(lambda: file.exists() and file.read_text().count("\n") > attempt)
    return float(file.read_text().split()[attempt])


def first_step(run: Any, start: int = 0) -> dict[str, Any]:
    """The event of the first finished step of the run's start with this number."""
    moment(lambda: len(run.events("first_step")) > start)
    event: dict[str, Any] = run.events("first_step")[start]
    return event


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def hurt(run: Any, number: signal.Signals, after_step: int) -> dict[str, float]:
    """A signal to one of the workers: seconds of a cold start, until the others are gone, and to the first new step."""
    cold = -batch_began(run) + first_step(run)["time"]
    start = run.reaches(after_step, saved=after_step - after_step % 7)
    victim = start.pids[1]
    hurt_at = time.time()
    os.kill(victim, number)
    noticed = moment(lambda: "stopped (as by SIGSTOP)" in run.text) if number == signal.SIGSTOP else None
    gone = moment(lambda: not any(lives(pid) for pid in start.pids.values()))
    again = first_step(run, 1)
    lost = run.starts()[0].last_step() - run.events("resumed")[1]["step"]
    run.hurry()
    run.ends()
    return {
        "cold": cold,
        "noticed": (noticed or gone) - hurt_at,
        "again": again["time"] - hurt_at,
        "lost": float(lost),
    }


def told(run: Any, floor: Floor) -> dict[str, float]:
    """A notice to all ranks: seconds of a cold start, until the last process is gone, and from the requeue to the first step.

    The last one less the wait of `floor`, which is requeued at the same moment.
    """
    rig = run.rig
    cold = -batch_began(run) + first_step(run)["time"]
    run.reaches(14)
    begun = time.time()
    run.notify("USR2")
    gone = moment(lambda: not run_processes(rig, floor))
    moment(lambda: run.events("requeued"))
    floor.requeue()
    again = first_step(run, 1)["time"] - run.events("requeued")[0]["time"]
    stopping = run.events("stopping")[0]
    saved = [event for event in run.events("saved") if event["step"] == stopping["step"]]
    run.hurry()
    run.ends()
    wait = floor.waits()[-1]
    return {
        "cold": cold,
        "gone": gone - begun - (saved[0]["seconds"] if saved else 0.0),
        "again": again - wait,
        "wait": wait,
    }


def run_processes(rig: Any, floor: Floor) -> list[Any]:
    """What lives of the user's processes on the nodes, but for the job that only writes the time."""
    return [process for process in rig.processes_of("hpcuser") if process.command != Floor.COMMAND]


def torchrun(bench: Bench) -> float:
    """Seconds from kill -9 of a worker to the first step of torchrun's restart, all ranks; one node, four ranks.

    Raises:
        NotMeasured: it has not come back.
    """
    rig, folder = bench.rig(), bench.user_folder()
    stamps = folder / "stamps"
    stamps.mkdir()
    shutil.copy(RIVALS / "restarting.py", folder)
    launcher = str(Path(rig.python).parent / "torchrun")
    words = ["srun", launcher, "--standalone", "--nproc-per-node=4", "--max-restarts=3", str(folder / "restarting.py")]
    options = ["--nodes=1", "--ntasks=1", "--cpus-per-task=8", f"--output={folder}/job.log", "--no-requeue"]
    owner = rig.home().stat()
    for path in (stamps, folder / "restarting.py"):
        os.chown(path, owner.st_uid, owner.st_gid)
    # Without the last one gloo finds the addresses of the dead workers in the store (pytorch issue 135712).
    environ = {"BENCH_STAMPS": str(stamps), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = rig.sbatch(*options, "--wrap", f"exec {shlex.join(words)}", cwd=folder, env=environ)

    def made(start: int) -> bool:
        return all((stamps / f"{start}.{rank}").exists() for rank in range(4))

    try:
        moment(lambda: made(0))
        time.sleep(1.0)
        killed_at = time.time()
        os.kill(int((stamps / "0.1.pid").read_text()), signal.SIGKILL)
        moment(lambda: made(1))
        last = max(float((stamps / f"1.{rank}").read_text()) for rank in range(4))
        (stamps / "quick").touch()
        rig.wait(job, timeout=60)
    finally:
        rig.cancel_jobs()
    return last - killed_at
