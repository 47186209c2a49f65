"""Jobs that end in many ways on the dev cluster, and what is there after them: processes, shared memory, files, ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster_rig import FIRST_USER, Rig, give_to

SCRIPT = Path(__file__).resolve().parent / "leaver" / "leave.py"
TOKEN = "LEAVER_TOKEN"
"""In the environment of all that a job starts, whoever launches it."""
KILL_WAIT_S = 5
READY_S = 150.0  # patience: machines are shared
RANKS = 4


@dataclass
class Left:
    """What is there of a job."""

    processes: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.files or self.ports)

    def count(self) -> dict[str, int]:
        return {name: len(found) for name, found in vars(self).items()}


class Leaver:
    """One job of two nodes with two ranks each."""

    def __init__(self, rig: Rig, kind: str) -> None:
        self.rig, self.kind, self.job = rig, kind, ""
        self.token = f"{kind}-{time.time_ns()}"
        self.folder = rig.home() / f"leaver {self.token}"
        self.folder.mkdir()
        shutil.copy(SCRIPT, self.folder)
        give_to(self.folder, FIRST_USER)
        self._pids: set[int] = set()

    @property
    def environ(self) -> dict[str, str]:
        clone = str(self.rig.clone)
        return {TOKEN: self.token, "PYTHONPATH": clone, "HPC_SITE_CONFIG": "", "OMP_NUM_THREADS": "1"}

    @property
    def command(self) -> list[str]:
        return [str(self.folder / "leave.py"), self.kind, str(self.folder)]

    def submit(self, *words: str) -> None:
        """With this toolkit: nothing comes back, so that the first end is the last."""
        argv = [self.rig.python, "-m", "hpc.submit", "--nodes", "2", "--gpus-per-node", "2", *words]
        argv += ["slurm.requeue=false", "launch.max_restarts=0", "--", *self.command]
        done = self.rig.run(argv, cwd=self.folder, env=self.environ, timeout=READY_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (self.job,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        self.rig.track(self.job)

    def sbatch(self, *words: str, step: str) -> None:
        """With a batch script of somebody else's; `step` is its one line."""
        options = ["--nodes=2", "--gpus-per-node=2", "--no-requeue", f"--output={self.folder}/job.log", *words]
        self.job = self.rig.sbatch(*options, "--wrap", step, cwd=self.folder, env=self.environ)

    def facts(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("[0-9]*.json"))]

    def ready(self) -> None:
        """Wait until all ranks are at work."""
        deadline = time.monotonic() + READY_S
        while len(self.facts()) < RANKS:
            assert time.monotonic() < deadline, f"{self.kind}: {self.facts()}\n{self.rig.report(self.job)}"
            time.sleep(0.2)
        self.look()

    def pid(self, rank: int) -> int:
        return int(str(self.facts()[rank]["pid"]))

    def owner(self, words: str, node: int = 0) -> int:
        """The oldest process of this job on a node with these words in its command."""
        name = self.rig.node_names[node]
        found = [p for p in self.rig.processes_of(FIRST_USER) if p.node == name and words in p.command]
        return min(p.pid for p in found if self._is_ours(p.pid) and os.stat(f"/proc/{p.pid}") and _parent(p.pid) != 1)

    def left_the_queue(self) -> bool:
        return not re.search(
            r"\S", self.rig.slurm("squeue", "--noheader", f"--jobs={self.job}", "--states=R,CG,S,CF", "--format=%i")
        )

    def look(self) -> Left:
        """What is there now."""
        found = Left()
        for process in self.rig.processes_of(FIRST_USER):
            if self._is_ours(process.pid):
                self._pids.add(process.pid)
                found.processes.append(f"{process.node} {process.pid} {process.command[:80]}")
        for path in Path("/dev/shm").glob("torch_*"):
            if int(path.name.split("_")[1]) in self._pids:
                found.shared_memory.append(path.name)
        facts = self.facts()
        found.files = [path for one in facts for path in map(str, one["paths"]) if os.path.exists(path)]  # type: ignore[call-overload]
        listening = {port for node in self.rig.node_names for port in self._listening(node)}
        found.ports = [int(str(one["port"])) for one in facts if one["port"] in listening]
        return found

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{TOKEN}={self.token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _listening(self, node: str) -> set[int]:
        """Ports of a node that somebody listens at: state 0A, proc(5)."""
        some = next((process.pid for process in self.rig.processes() if process.node == node), None)
        if some is None:
            return set()
        lines = Path(f"/proc/{some}/net/tcp").read_text().splitlines()[1:]
        return {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"}

    def close(self) -> None:
        """End what is there still, whoever has left it, and take the folder away."""
        for process in self.rig.processes_of(FIRST_USER):
            if self._is_ours(process.pid):
                os.kill(process.pid, signal.SIGKILL)
        left = self.look()
        for name in left.shared_memory:
            Path("/dev/shm", name).unlink(missing_ok=True)
        for name in left.files:
            shutil.rmtree(name, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True)
class End:
    """One kind of end: how it is brought about once all ranks are at work."""

    name: str
    bring: Callable[[Leaver], object]
    kind: str = "wait"
    """What the script itself does at FOLDER/go."""
    submit: Sequence[str] = ()
    breaks_node: bool = False
    patience_s: float = 30.0
    """Then the user cancels what goes on as if nothing had been."""


def _go(job: Leaver) -> None:
    (job.folder / "go").touch()


def _signal(number: signal.Signals, *ranks: int) -> Callable[[Leaver], None]:
    def bring(job: Leaver) -> None:
        for pid in [job.pid(rank) for rank in ranks]:
            os.kill(pid, number)

    return bring


def _preempt(job: Leaver) -> None:
    options = ["--partition=high", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap", "sleep 1"]
    job.rig.sbatch(*options, cwd=job.folder)


def _kill_slurmd(job: Leaver) -> None:
    os.kill(job.rig.daemon(f"slurmd-{job.rig.node_names[1]}"), signal.SIGKILL)


def _kill_launcher(words: str) -> Callable[[Leaver], None]:
    return lambda job: os.kill(job.owner(words), signal.SIGKILL)


def ends(agent: str = "-m hpc.node", controller: str = "-m hpc.launch") -> list[End]:
    """All kinds; `agent` and `controller` are words in the command lines of a launcher's processes."""
    return [
        End("success", _go),
        End("exception on one rank", _go, kind="exception"),
        End("exit(1) on one rank", _go, kind="exit"),
        End("SIGTERM to one rank", _signal(signal.SIGTERM, 1)),
        End("SIGKILL to one rank", _signal(signal.SIGKILL, 1)),
        End("SIGKILL to all ranks", _signal(signal.SIGKILL, *range(RANKS))),
        End("SIGSTOP to one rank", _signal(signal.SIGSTOP, 1)),
        End("scancel where SIGTERM is ignored", lambda job: job.rig.slurm("scancel", job.job), kind="deaf"),
        End("scancel", lambda job: job.rig.slurm("scancel", job.job)),
        End("scancel of all with SIGKILL", lambda job: job.rig.slurm("scancel", "--signal=KILL", "--full", job.job)),
        End("time limit", lambda job: None, submit=("--time=1",), patience_s=150),
        End("preemption", _preempt),
        End("slurmd killed", _kill_slurmd, breaks_node=True, patience_s=120),
        End("agent killed", _kill_launcher(agent)),
        End("controller killed", _kill_launcher(controller)),
    ]


def outcome(job: Leaver, end: End) -> Left:
    """Bring the end about, wait until the job has left the queue, and look again after 5 s (7 s past the KillWait)."""
    end.bring(job)
    cancel_at = time.monotonic() + end.patience_s
    give_up_at = cancel_at + 60
    while not job.left_the_queue():
        now = time.monotonic()
        if now > cancel_at:
            cancel_at = give_up_at
            job.rig.slurm("scancel", job.job)
        assert now < give_up_at, f"{end.name}: {job.rig.report(job.job)}"
        time.sleep(0.2)
    until = time.monotonic() + (KILL_WAIT_S + 2 if end.kind == "deaf" else 5)
    while (left := job.look()) and time.monotonic() < until:
        time.sleep(0.3)
    return left
