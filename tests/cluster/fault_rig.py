"""A run of the job `drill` under faults: submitted for real, watched by its ranks' diaries, held against a quiet run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cluster_rig import FINAL_STATES, FIRST_USER, Process, Rig, give_to

if TYPE_CHECKING:
    from torch import Tensor

DRILL = Path(__file__).resolve().parent / "drill"
TOTAL, EVERY = 40, 7
"""Steps of a run, and between two of its checkpoints."""
SAMPLES, STEPS_PER_EPOCH = 236, 10
LIMIT_S = 120.0  # patience of the tests, not a promise: machines are shared
SMALL = ("--nodes", "2", "--gpus-per-node", "2")
LARGE = ("--nodes", "2", "--gpus-per-node", "4")


@dataclass(frozen=True)
class Start:
    """One start of the step, by the diaries of its ranks."""

    name: str
    pids: dict[int, int]
    diaries: dict[int, list[dict[str, Any]]]

    @property
    def began(self) -> float:
        return min(lines[0]["time"] for lines in self.diaries.values() if lines)

    def steps(self, rank: int = 0) -> list[int]:
        return [line["step"] for line in self.diaries.get(rank, []) if line["did"] == "step"]

    def last_step(self) -> int:
        """The newest step that a rank has begun; 0 for none."""
        return max((max(self.steps(rank), default=0) for rank in self.diaries), default=0)

    def did(self, what: str) -> list[dict[str, Any]]:
        return [line for lines in self.diaries.values() for line in lines if line["did"] == what]


class Drill:
    """One run in a folder of its own, with the job in its jobs/drill."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder, self.job_id, self.path = rig, folder, "", Path()
        self.job_ids: list[str] = []
        self.checkpoint_folder = Path()
        """As this test sees it."""
        shutil.copytree(DRILL, folder / "jobs" / "drill", ignore=shutil.ignore_patterns("__pycache__"))
        give_to(folder, FIRST_USER)

    # ---- what a user does ----

    def submit(self, *words: str) -> None:
        """Submit the job (again, into the same run directory)."""
        again = [f"run_dir={self.path}"] if self.job_ids else []
        argv = [self.rig.python, "-m", "hpc.submit", *words, "jobs.drill", *again]
        done = self.rig.run(argv, cwd=self.folder, env=self.environ, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (self.job_id,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        (path,) = re.findall(r"^ +directory +(.*)$", done.stdout, re.MULTILINE)
        if not again:
            self.path, self.checkpoint_folder = Path(path), Path(path) / "checkpoints"
        self.job_ids.append(self.rig.track(self.job_id))

    @property
    def environ(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.rig.clone), "HPC_SITE_CONFIG": ""}

    def hurry(self) -> None:
        """From now on no phase is slowed down."""
        (self.path / "quick").touch()

    def notify(self, name: str) -> None:
        """A notice to every task of the job's steps, by name ("USR2"), as Slurm sends it."""
        self.rig.slurm("scancel", f"--signal={name}", self.job_id)

    def ends(self, limit_s: float = LIMIT_S) -> str:
        return self.rig.wait(self.job_id, timeout=limit_s)

    # ---- what it looks like ----

    @property
    def text(self) -> str:
        """The screens of all its jobs."""
        files = [self.path / f"slurm-{job_id}.out" for job_id in self.job_ids]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.path / "record.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def decisions(self) -> list[str]:
        return [event["decision"] for event in self.events("decided")]

    def reasons(self) -> str:
        """What the record says of the causes: of each agreed stop, each decision, and what Slurm did by itself."""
        ours = [event["reason"] for event in (*self.events("stopping"), *self.events("decided"))]
        slurms = [f"Slurm: {event['by_slurm']} {event['lost_nodes']}" for event in self.events("ending")]
        return "\n".join((*ours, *slurms))

    def starts(self) -> list[Start]:
        """The starts that came as far as the job's code, oldest first."""
        found: dict[str, Start] = {}
        for file in (self.path / "diary").glob("*.jsonl"):
            name, rank, pid, _ = file.name.split(".")
            start = found.setdefault(name, Start(name, {}, {}))
            lines = file.read_bytes().split(b"\n")[:-1]
            if lines:
                start.pids[int(rank)] = int(pid)
                start.diaries[int(rank)] = list(map(json.loads, lines))
        return sorted((start for start in found.values() if start.diaries), key=lambda start: start.began)

    def checkpoints(self) -> list[int]:
        """Steps of the published checkpoints."""
        found = self.checkpoint_folder.glob("step-*")
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def until(self, what: Callable[[], Any], limit_s: float = LIMIT_S, *, may_end: bool = False) -> Any:
        """Wait until it is so, and return it; the run may not end meanwhile, unless it `may_end`."""
        began = looked = time.monotonic()
        while not (found := what()):
            now = time.monotonic()
            assert now < began + limit_s, self.report()
            if now > looked + 2 and not may_end:
                looked = now
                assert self.rig.state(self.job_id) not in FINAL_STATES or what(), self.report()
            time.sleep(0.05)
        return found

    def reaches(self, step: int, *, starts: int = 1, saved: int | None = None) -> Start:
        """Wait until every rank of this start has begun the step, and a checkpoint is there."""

        def there() -> Start | None:
            found = self.starts()
            if len(found) < starts or len(found[starts - 1].diaries) < self.world_size:
                return None
            start = found[starts - 1]
            begun = min(max(start.steps(rank), default=0) for rank in start.diaries)
            return start if begun >= step and (saved is None or saved in self.checkpoints()) else None

        start: Start = self.until(there)
        return start

    @cached_property
    def world_size(self) -> int:
        return int(self.until(lambda: self.events("started"))[0]["world_size"])

    def does(self, what: str, **facts: Any) -> None:
        """Wait until a rank notes in its diary that it does this."""
        wanted = {"did": what, **facts}.items()
        self.until(lambda: any(wanted <= line.items() for start in self.starts() for line in start.did(what)))

    def process(self, words: str, node: int = 0) -> Process:
        """The oldest process of the job on a node with these words in its command."""
        name = self.rig.node_names[node]
        found = [p for p in self.rig.processes_of(FIRST_USER) if p.node == name and words in p.command]
        return min(found, key=lambda process: started(process.pid))

    def report(self) -> str:
        """All that is known, for the message of a failed test."""
        record = self.path / "record.jsonl"
        told = [f"{s.name}: {[(r, s.steps(r)[:1], s.steps(r)[-1:]) for r in s.diaries]}" for s in self.starts()]
        parts = [self.rig.report(self.job_id), record.read_text() if record.exists() else "no record", *told]
        return "\n".join(parts)

    # ---- what has to be true ----

    def check_gone(self, limit_s: float = 15) -> None:
        """No process of the ordinary user is left on any node."""
        deadline = time.monotonic() + limit_s
        while left := self.rig.processes_of(FIRST_USER):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def check(self, reference: Drill, *, lost: Sequence[int], cause: str, limit_s: float = LIMIT_S) -> None:
        """The run has come to its end, with what the quiet run has got.

        `lost`: how many steps each start but the last may have lost; `cause`: what the record says of the reasons.
        """
        assert self.ends(limit_s) == "COMPLETED", self.report()
        self.check_gone()
        assert re.search(cause, self.reasons()), self.report()
        starts = self.starts()
        assert len(starts) == len(lost) + 1, self.report()
        for before, after, allowed in zip(starts, starts[1:], lost, strict=False):
            check_lost(before, after, allowed)
        assert self.samples() == reference.samples()
        assert self.metrics("train") == reference.metrics("train")
        assert self.metrics("eval") == reference.metrics("eval")
        mine, its = self.weights(), reference.weights()
        assert mine.keys() == its.keys() and all(mine[name].equal(its[name]) for name in its)

    def samples(self) -> dict[int, dict[int, list[int]]]:
        """Step -> rank -> the ids that it took, by the last start that came by."""
        taken: dict[int, dict[int, list[int]]] = {}
        for start in self.starts():
            for rank, lines in start.diaries.items():
                for line in lines:
                    if line["did"] == "step":
                        taken.setdefault(line["step"], {})[rank] = line["ids"]
        assert sorted(taken) == list(range(1, TOTAL + 1)), self.report()
        return taken

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """The figures that do not depend on the clock, in the order of the file."""
        lines = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        clock = ("time", "samples_per_s")
        return [{k: v for k, v in line.items() if k not in clock} for line in lines if line["kind"] == kind]

    def weights(self) -> dict[str, Tensor]:
        from hpc.train import checkpoint  # late: torch is not for every test of this folder

        return checkpoint.read(self.checkpoint_folder / f"step-{TOTAL}")[0]


class Quiet:
    """The run that meets no fault, once for each shape and setting."""

    done: ClassVar[dict[tuple[str, ...], Drill]] = {}

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def __call__(self, *words: str) -> Drill:
        words = words or SMALL
        if words not in self.done:
            self.done[words] = self.trained(words)
        return self.done[words]

    def trained(self, words: tuple[str, ...]) -> Drill:
        run = new_drill(self.rig, f"quiet {len(self.done)}")
        run.submit(*words, "step_s=0")
        assert run.ends() == "COMPLETED", run.report()
        (start,) = run.starts()
        assert all(start.steps(rank) == list(range(1, TOTAL + 1)) for rank in start.diaries)
        assert [line["step"] for line in run.metrics("train")] == list(range(1, TOTAL + 1))
        taken = run.samples()
        for first in range(1, TOTAL, STEPS_PER_EPOCH):
            epoch = [taken[step] for step in range(first, first + STEPS_PER_EPOCH)]
            assert sorted(i for shares in epoch for ids in shares.values() for i in ids) == list(range(SAMPLES))
        return run


def new_drill(rig: Rig, name: str) -> Drill:
    """A run that is not submitted yet."""
    return Drill(rig, rig.home() / f"work {name[:40]} {time.time_ns()}")


def check_lost(before: Start, after: Start, allowed: int) -> None:
    """A notice loses nothing: all ranks stop after the same step. A kill loses at most so many finished steps."""
    first = after.steps()[0]
    if allowed == 0:
        ended = {rank: max(before.steps(rank), default=first - 1) for rank in before.diaries}
        assert set(ended.values()) == {first - 1}, (first, ended)
    else:
        assert before.last_step() - first <= allowed, (first, before.last_step())


def started(pid: int) -> float:
    """In clock ticks since boot; infinity when it has ended. Process ids start anew at some number. Source: proc_pid_stat(5)."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return float("inf")


def kill(pid: int) -> None:
    """The nodes' processes live on this machine."""
    os.kill(pid, signal.SIGKILL)
