"""Training runs on the dev cluster that are to come back by themselves: ours, and what people use now.

Each runs ranks that step for ever, mostly asleep, and keeps a diary of the steps it began (parts/diary.py).
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diary import Diary, Start, until
from frame import RIVALS, Bench, NotMeasured

RACER = RIVALS.parent / "racer"
LIMIT_S = 180.0
MEMORY = 64 << 20
"""What a worker that is to run out of memory may still take."""


class Contestant(abc.ABC):
    """One run of so many ranks."""

    name = ""
    comes_back = True
    """By itself, after a crash; otherwise somebody has to submit it again."""

    def __init__(self, bench: Bench, ranks: int) -> None:
        self.rig = bench.rig()
        self.folder, self.ranks = bench.user_folder(), ranks
        self.diary = Diary(self.folder / "diary", ranks)
        self.job_id = ""
        self.looked = 0.0

    @abc.abstractmethod
    def submit(self) -> None:
        """Send the job."""

    def notice(self) -> None:
        """The warning signal, as Slurm sends it to this contestant."""
        self.rig.slurm("scancel", "--signal=USR2", self.job_id)

    def requeue(self) -> None:
        self.rig.slurm("scontrol", "requeue", self.job_id)

    def begun_again(self, starts: int, limit_s: float = LIMIT_S) -> Start:
        """The start after that many others, once all its ranks have begun a step."""

        def there() -> Start | None:
            found = self.diary.starts()
            return found[starts] if len(found) > starts else None

        return until(there, limit_s, f"start {starts + 1} of {self.name}")

    def trains_on(self, starts: int, steps: int) -> Start:
        """The same, once all have begun so many further steps."""
        first = self.begun_again(starts).first

        def there() -> Start | None:
            start = self.diary.starts()[starts]
            return start if start.all_began(first + steps) else None

        return until(there, LIMIT_S, f"step {first + steps} of {self.name}")

    def hurt(self, kind: str, start: Start) -> None:
        """One fault, of a kind that every contestant can suffer."""
        if kind == "kill":
            os.kill(start.pids[1], signal.SIGKILL)
        elif kind == "segfault":
            os.kill(start.pids[0], signal.SIGSEGV)
        elif kind == "notice":
            self.notice()
        else:
            self.requeue()

    def end(self) -> None:
        with contextlib.suppress(AssertionError):
            self.rig.slurm("scancel", "--quiet", self.job_id)


class Ours(Contestant):
    """`python -m hpc.submit`, with the job sbin/bench.d/racer."""

    name = "ours"

    def __init__(self, bench: Bench, *words: str, nodes: int = 1, gpus: int = 2, ranks: int = 2) -> None:
        super().__init__(bench, ranks)
        self.words = ["--nodes", str(nodes), "--gpus-per-node", str(gpus), *words]
        self.path = Path()
        shutil.copytree(RACER, self.folder / "jobs" / "racer", ignore=shutil.ignore_patterns("__pycache__"))
        self._belongs_to_user()

    def _belongs_to_user(self) -> None:
        owner = self.folder.stat()
        for top, _, files in os.walk(self.folder):
            for path in (top, *(os.path.join(top, name) for name in files)):
                os.chown(path, owner.st_uid, owner.st_gid)

    def submit(self) -> None:
        began = f'slurm.setup=["date +%s.%N >> {self.folder}/began"]'
        limit = [] if "--time" in self.words else ["--time", "60"]
        argv = [self.rig.python, "-m", "hpc.submit", *limit, *self.words, "jobs.racer", began]
        environ = {"PYTHONPATH": str(self.rig.clone), "HPC_SITE_CONFIG": ""}
        done = self.rig.run(argv, cwd=self.folder, env=environ, timeout=LIMIT_S)
        found = re.search(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        path = re.search(r"^ +directory +(.*)$", done.stdout, re.MULTILINE)
        if found is None or path is None:
            raise NotMeasured(f"hpc.submit: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
        self.job_id, self.path = self.rig.track(found[1]), Path(path[1])
        self.diary = Diary(self.path / "diary", self.ranks)

    def accident(self, kind: str, start: Start) -> None:
        """Rank 0 has a segmentation fault, or runs out of the memory of a cgroup so that the kernel ends it.

        Raises:
            NotMeasured: this machine has no cgroups for memory.
        """
        if kind == "memory":
            confine(start.pids[0], f"hpc-bench-{os.getpid()}-{self.job_id}-{start.name}")
        order = self.path / "accident.new"
        order.write_text(kind)
        owner = self.path.stat()
        os.chown(order, owner.st_uid, owner.st_gid)
        order.rename(self.path / "accident.0")

    def cold_starts(self) -> list[float]:
        """Seconds from the begin of each attempt's batch script to the first step of all its ranks."""
        began = [float(line) for line in (self.folder / "began").read_text().split()]
        firsts: dict[int, float] = {}
        for start in self.diary.starts():
            all_step = max(lines[0][0] for lines in start.steps.values())
            firsts.setdefault(int(start.name.split("-")[0]), all_step)
        return [firsts[attempt] - at for attempt, at in enumerate(began) if attempt in firsts]


class Torchrun(Contestant):
    """torchrun --max-restarts in a batch script that puts itself back into the queue; a save each few seconds."""

    name = "torchrun"

    def __init__(self, bench: Bench, ranks: int, save_s: float, step_s: float) -> None:
        super().__init__(bench, ranks)
        self.environ = rival_environ(self.folder, self.rig, ranks, save_s, step_s)

    def submit(self) -> None:
        script = self.folder / "periodic_torchrun.sbatch"
        options = [
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={self.ranks}",
            f"--gpus-per-node={self.ranks}",
            "--time=60",
            "--requeue",
        ]
        options += [f"--output={self.folder}/job.log", "--open-mode=append", "--signal=B:USR2@90"]
        self.job_id = self.rig.sbatch(*options, script, cwd=self.folder, env=self.environ)

    def notice(self) -> None:
        self.rig.slurm("scancel", "--batch", "--signal=USR2", self.job_id)


class Submitit(Contestant):
    """A Checkpointable of submitit, which saves each few seconds and when it is told to go."""

    name = "submitit"
    comes_back = False

    def __init__(self, bench: Bench, ranks: int, save_s: float, step_s: float) -> None:
        super().__init__(bench, ranks)
        self.environ = rival_environ(self.folder, self.rig, ranks, save_s, step_s)

    def submit(self) -> None:
        argv = [self.rig.python, self.folder / "periodic_submitit.py"]
        done = self.rig.run(argv, cwd=self.folder, env=self.environ, timeout=LIMIT_S)
        if done.returncode != 0:
            raise NotMeasured(f"submitit: {done.stderr.strip().splitlines()[-1:]}")
        self.job_id = self.rig.track(done.stdout.split()[-1])


def rival_environ(folder: Path, rig: Any, ranks: int, save_s: float, step_s: float) -> dict[str, str]:
    """The rivals' scripts in the user's folder, and what they find in their environment."""
    owner = folder.stat()
    (folder / "diary").mkdir()
    os.chown(folder / "diary", owner.st_uid, owner.st_gid)
    for path in (*RIVALS.glob("periodic*"), RIVALS / "torch_save.py"):
        shutil.copy(path, folder)
    return {
        "BENCH_FOLDER": str(folder),
        "BENCH_RANKS": str(ranks),
        "BENCH_SAVE_S": f"{save_s:g}",
        "BENCH_STEP_S": f"{step_s:g}",
        "BENCH_TORCHRUN": str(Path(rig.python).parent / "torchrun"),
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }


def confine(pid: int, name: str) -> None:
    """Move the process into a cgroup in which it may take no more than MEMORY from now on."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(top, name)
        if not (Path(top) / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(MEMORY))
            with contextlib.suppress(OSError):  # no swap, where it is counted
                (group / "memory.swappiness").write_text("0")
            (group / "cgroup.procs").write_text(str(pid))
            return
    raise NotMeasured("no cgroup for memory can be made here, so nothing can run out of it")


def forget_groups() -> None:
    """Take away what `confine` has made, once its processes are gone."""
    for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        for group in Path(top).glob(f"hpc-bench-{os.getpid()}-*"):
            with contextlib.suppress(OSError):
                group.rmdir()


class Floor:
    """A job that only writes the time at which it starts: Slurm's own wait after a requeue."""

    COMMAND = "sleep 3599"

    def __init__(self, bench: Bench) -> None:
        self.rig, self.folder = bench.rig(), bench.user_folder()
        self.asked: list[float] = []
        wrap = f"date +%s.%N >> {self.folder}/times; exec {self.COMMAND}"
        options = ["--nodes=1", "--ntasks=1", "--mem=100", "--requeue", f"--output={self.folder}/job.log"]
        self.job_id = self.rig.sbatch(*options, "--wrap", wrap, cwd=self.folder)
        self.rig.jobs.remove(self.job_id)  # it outlives the runs beside it
        bench.at_end(self.end)
        until(lambda: self._times(), LIMIT_S, "the job that writes the time")

    def _times(self) -> list[float]:
        file = self.folder / "times"
        return [float(line) for line in file.read_text().split()] if file.exists() else []

    def end(self) -> None:
        with contextlib.suppress(AssertionError):
            self.rig.slurm("scancel", "--quiet", self.job_id)

    def requeue(self) -> None:
        """Unless it waits in the queue already."""
        if len(self._times()) > len(self.asked):
            self.asked.append(time.time())
            self.rig.slurm("scontrol", "requeue", self.job_id)

    def waits(self) -> list[float]:
        """Seconds from each requeue to the start after it; waits for the last one."""
        until(lambda: len(self._times()) > len(self.asked), LIMIT_S, "the job that writes the time")
        return [start - asked for asked, start in zip(self.asked, self._times()[1:], strict=False)]


def trained_together(contestants: Sequence[Contestant]) -> None:
    """Submit them one after the other: each one's first start has the cores to itself."""
    for contestant in contestants:
        contestant.submit()
        contestant.trains_on(0, 4)
