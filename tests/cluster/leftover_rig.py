"""Jobs that end in many ways on the dev cluster, and what is there after them: processes, shared memory, files, ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster_rig import FINAL_STATES, FIRST_USER, Rig, give_to

SCRIPT = Path(__file__).resolve().parent / "leaver" / "leave.py"
TOKEN = "LEAVER_TOKEN"
"""In the environment of all that a job starts, whoever launches it."""
KILL_WAIT_S = 5
GIVE_UP_S = 150.0
"""After a cancel: Slurm calls a step that it cannot end over after 60 s (slurm.conf(5), UnkillableStepTimeout)."""
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


class Files:
    """/dev/shm and /tmp of a node, as its jobs see them. Nodes of the dev cluster share /tmp, also with the machine.

    With `own` they are new and empty: nobody else's files are seen, and no other node's agents can clear them away.
    Opened, so that they are still there for a look when nothing of the node lives any more.
    """

    def __init__(self, rig: Rig, node: str, *, own: bool) -> None:
        slurmd = rig.daemon(f"slurmd-{node}")
        self.own, self._root = own, f"/proc/{slurmd}/root"
        if own:
            inside = ["nsenter", f"--target={slurmd}", "--mount"]
            for place in ("/dev/shm", "/tmp"):
                subprocess.run([*inside, "umount", "--lazy", place], stderr=subprocess.DEVNULL, check=False)
                mount = ["mount", "-t", "tmpfs", "-o", "mode=1777,size=512m", "tmpfs", place]
                subprocess.run([*inside, *mount], check=True)
        self._shm = os.open(f"{self._root}/dev/shm", os.O_RDONLY)
        self._tmp = os.open(f"{self._root}/tmp", os.O_RDONLY)

    def shared_memory(self, pids: set[int]) -> list[str]:
        """All of it, or on a shared machine what these processes have made."""
        names = sorted(os.listdir(self._shm))
        return [name for name in names if self.own or (name.startswith("torch_") and int(name.split("_")[1]) in pids)]

    def temporary(self, told: Sequence[str]) -> list[str]:
        """All of it, or on a shared machine those of the paths that were told."""
        if self.own:
            return [f"/tmp/{name}" for name in sorted(os.listdir(self._tmp))]
        return [path for path in told if os.path.exists(path)]

    def remove_shared_memory(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._shm)

    def close(self) -> None:
        os.close(self._shm)
        os.close(self._tmp)


class Leaver:
    """One job of two nodes with two ranks each."""

    def __init__(self, rig: Rig, kind: str, nodes: Sequence[str] = (), *, own_files: bool = False) -> None:
        """`nodes`: two of them, for this job alone; else Slurm chooses."""
        self.rig, self.kind, self.job, self.asked = rig, kind, "", tuple(nodes)
        self.others: list[str] = []
        """Jobs that were sent to bring its end about."""
        self.seen: list[str] = []
        """What squeue said of it while its end was waited for, each answer with its time when it was another one."""
        self.token = f"{kind}-{time.time_ns()}"
        self.folder = rig.home() / f"leaver {self.token}"
        self.folder.mkdir()
        shutil.copy(SCRIPT, self.folder)
        give_to(self.folder, FIRST_USER)
        self._pids: set[int] = set()
        self._files = {node: Files(rig, node, own=own_files) for node in nodes or rig.node_names[:2]}

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
        argv += [f"slurm.nodelist={','.join(self.asked)}"] if self.asked else []
        argv += ["slurm.requeue=false", "launch.max_restarts=0", "--", *self.command]
        done = self.rig.run(argv, cwd=self.folder, env=self.environ, timeout=READY_S)
        assert done.returncode == 0, done.stdout + done.stderr
        (self.job,) = re.findall(r"^job (\d+) submitted", done.stdout, re.MULTILINE)
        self.rig.track(self.job)

    def sbatch(self, *words: str, step: str) -> None:
        """With a batch script of somebody else's; `step` is its one line."""
        options = ["--nodes=2", "--gpus-per-node=2", "--no-requeue", f"--output={self.folder}/job.log", *words]
        options += [f"--nodelist={','.join(self.asked)}"] if self.asked else []
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

    @property
    def nodes(self) -> list[str]:
        """In the order of ranks."""
        return list(dict.fromkeys(str(one["node"]) for one in self.facts()))

    def owner(self, words: str, node: int = 0, *, newest: bool = False) -> int:
        """The oldest (or newest) process of this job on a node with these words in its command, sentinels left out."""
        name = self.nodes[node]
        found = [p for p in self.rig.processes_of(FIRST_USER) if p.node == name and words in p.command]
        pids = [p.pid for p in found if self._is_ours(p.pid) and _parent(p.pid) != 1]
        assert pids, f"{words!r}: no such process on {name}"
        return (max if newest else min)(pids, key=_started)

    def left_the_queue(self) -> bool:
        states = self._states(self.job)
        answer = " ".join(sorted(states)) or "nothing"
        if not self.seen or self.seen[-1].split(maxsplit=1)[1] != answer:
            self.seen.append(f"{time.strftime('%H:%M:%S')} {answer}")
        return states <= {"PENDING", *FINAL_STATES}

    def _states(self, *jobs: str) -> set[str]:
        """In squeue's words, asked without a filter: a state that nobody has thought of is no end."""
        words = ["--noheader", f"--jobs={','.join(jobs)}", "--states=all", "--format=%T"]
        return set(self.rig.slurm("squeue", *words).split())

    def story(self) -> str:
        """How it left the queue, and what Slurm knows of it: for whoever finds something of it afterwards."""
        try:
            known = str(self.rig.job(self.job))
        except (AssertionError, subprocess.SubprocessError) as error:  # it is forgotten by now
            known = str(error)
        return f"squeue said {'; '.join(self.seen)}; now, at {time.strftime('%H:%M:%S')}: {known}"

    def look(self) -> Left:
        """What is there now."""
        found, facts = Left(), self.facts()
        for process in self.rig.processes_of(FIRST_USER):
            if self._is_ours(process.pid):
                self._pids.add(process.pid)
                found.processes.append(f"{process.node} {process.pid} {process.command[:80]}")
        for node, files in self._files.items():
            told = [str(path) for one in facts if one["node"] == node for path in one["paths"]]  # type: ignore[attr-defined]
            found.shared_memory += [f"{node} {name}" for name in files.shared_memory(self._pids)]
            found.files += [f"{node} {path}" for path in files.temporary(told)]
        listening = self._listening()
        found.ports = [int(str(one["port"])) for one in facts if (one["node"], one["port"]) in listening]
        return found

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{TOKEN}={self.token}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def _listening(self) -> set[tuple[str, int]]:
        """Ports of the nodes that somebody listens at: state 0A, proc(5)."""
        some = {process.node: process.pid for process in self.rig.processes() if process.node in self._files}
        found = set()
        for node, pid in some.items():
            try:
                lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
            except OSError:  # it has ended
                lines = []
            found |= {(node, int(line.split()[1].rpartition(":")[2], 16)) for line in lines if line.split()[3] == "0A"}
        return found

    def cancel(self) -> None:
        """Its jobs, and not those of others that run beside it; returns when its nodes are free."""
        jobs = [job for job in (self.job, *self.others) if job]
        deadline = time.monotonic() + GIVE_UP_S
        while self._in_queue(*jobs):
            self.rig.slurm("scancel", "--quiet", *jobs)
            assert time.monotonic() < deadline, self.rig.report(self.job)
            time.sleep(0.5)
        self.rig.jobs = [job for job in self.rig.jobs if job not in jobs]

    def _in_queue(self, *jobs: str) -> bool:
        """Whether one of them has not left the queue for good; one that waits has not."""
        return bool(jobs) and not self._states(*jobs) <= {*FINAL_STATES}

    def close(self) -> None:
        """End what is there still, whoever has left it, and take the folder away."""
        for process in self.rig.processes_of(FIRST_USER):
            if self._is_ours(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        left = self.look()
        for node, files in self._files.items():
            if not files.own:
                for name in left.shared_memory:
                    if name.startswith(f"{node} "):
                        files.remove_shared_memory(name.partition(" ")[2])
                for name in left.files:
                    shutil.rmtree(name.partition(" ")[2], ignore_errors=True)
            files.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


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
    gpus, nodes = job.rig.shape.gpus_per_node, ",".join(job.nodes)
    options = ["--partition=high", "--nodes=2", f"--nodelist={nodes}", f"--gpus-per-node={gpus}", "--output=/dev/null"]
    job.others.append(job.rig.sbatch(*options, "--wrap", "sleep 1", cwd=job.folder))


def _kill_slurmd(job: Leaver) -> None:
    os.kill(job.rig.daemon(f"slurmd-{job.nodes[1]}"), signal.SIGKILL)


def _kill_launcher(words: str, *, newest: bool = False) -> Callable[[Leaver], None]:
    return lambda job: os.kill(job.owner(words, newest=newest), signal.SIGKILL)


def _kill_and_cancel(words: str) -> Callable[[Leaver], None]:
    """The other node's agent: from then on Slurm starts nothing there that could clear up after it."""

    def bring(job: Leaver) -> None:
        agent = job.owner(words, node=1)
        os.kill(agent, signal.SIGKILL)
        job.rig.slurm("scancel", job.job)

    return bring


def ends(
    agent: str = "-m hpc.node", controller: str = "-m hpc.launch", batch_script: str = "-m hpc.launch"
) -> list[End]:
    """All kinds; `agent`, `controller` and `batch_script` are words in the command lines of a launcher's processes."""
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
        End("controller killed", _kill_launcher(controller, newest=True)),
        End("batch script killed", _kill_launcher(batch_script)),
        End("agent killed, and scancel", _kill_and_cancel(agent)),
    ]


def outcome(job: Leaver, end: End) -> Left:
    """Bring the end about, wait until the job has left the queue, and look again after 5 s (7 s past the KillWait)."""
    end.bring(job)
    cancel_at = time.monotonic() + end.patience_s
    give_up_at = cancel_at + GIVE_UP_S
    while not job.left_the_queue():
        now = time.monotonic()
        if now > cancel_at:
            cancel_at = give_up_at
            job.rig.slurm("scancel", job.job)
        assert now < give_up_at, f"{end.name}: {job.rig.report(job.job)}"
        time.sleep(0.3)
    until = time.monotonic() + (KILL_WAIT_S + 2 if end.kind == "deaf" else 5)
    while (left := job.look()) and time.monotonic() < until:
        time.sleep(0.3)
    return left
