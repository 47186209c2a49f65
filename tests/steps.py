"""Run the tasks of a job step as srun would, without Slurm: real agents and workers, one process group each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = f"7{os.environ.get('PYTEST_XDIST_WORKER', '').removeprefix('gw')}"
"""The id of the steps' job: steps of the same job at the same time on one machine would meet, so each process has its own."""
TAIL = 8000
"""Characters of each task's output that a failed test shows."""
LIMIT_S = 150.0  # patience of the tests, not a promise: machines are shared


def step_environ(
    task: int, *, tasks_per_node: Sequence[int] = (2,), job_id: str = JOB, **changes: str | int | None
) -> dict[str, str]:
    """What one task of a step sees; several nodes are simulated on this machine (MASTER_ADDR 127.0.0.1)."""
    nodes = len(tasks_per_node)
    node, first = 0, 0
    while task >= first + tasks_per_node[node]:
        first += tasks_per_node[node]
        node += 1
    values: dict[str, str | int | None] = {
        "SLURM_JOB_ID": job_id,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": task,
        "SLURM_LOCALID": task - first,
        "SLURM_NODEID": node,
        "SLURM_STEP_NUM_TASKS": sum(tasks_per_node),
        "SLURM_NTASKS": sum(tasks_per_node),
        "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks_per_node)),
        "SLURM_STEP_NODELIST": "n1" if nodes == 1 else f"n[1-{nodes}]",
        "SLURM_JOB_NODELIST": "n1" if nodes == 1 else f"n[1-{nodes}]",
        "MASTER_ADDR": None if nodes == 1 else "127.0.0.1",
        "GLOO_SOCKET_IFNAME": None if nodes == 1 else "lo",
        **changes,
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OPENBLAS_CORETYPE") if name in os.environ}
    kept |= {"PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": ""}
    return {**kept, **{name: str(value) for name, value in values.items() if value is not None}}


@dataclass
class Ended:
    """How one task ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float = 0.0


@dataclass
class Step:
    """Running tasks. Use as a context manager: whatever is left at the end is ended, by the ids that were seen."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        for process in self.seen.values():
            if process.is_running():
                process.kill()
        for child in self.processes:
            child.wait()
        for number, child in enumerate(self.processes):  # pytest shows it of a test that failed
            print(f"---- task {number}, exit code {child.returncode}:\n{self.text(number)[-TAIL:]}")

    def start(self, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
        number = len(self.processes)
        out = open(self.folder / f"out-{number}.txt", "w")
        err = open(self.folder / f"err-{number}.txt", "w")
        child = subprocess.Popen(
            argv, env=dict(environ), cwd=self.folder, stdout=out, stderr=err, stdin=subprocess.DEVNULL, text=True
        )
        out.close()
        err.close()
        self.processes.append(child)
        return child

    def agent(self, environ: Mapping[str, str], *arguments: str) -> subprocess.Popen[str]:
        """`python -m hpc.node` as one task."""
        return self.start([sys.executable, "-m", "hpc.node", *arguments], environ)

    def look(self) -> list[psutil.Process]:
        """Remember and return every living descendant; call it while they run."""
        for child in self.processes:
            try:
                process = psutil.Process(child.pid)
                for found in (process, *process.children(recursive=True)):
                    self.seen.setdefault(found.pid, found)
            except psutil.NoSuchProcess:
                continue
        return self.left()

    def left(self) -> list[psutil.Process]:
        """Those seen that still live (zombies do not)."""
        alive = []
        for process in self.seen.values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.NoSuchProcess:
                continue
        return alive

    def gone(self, limit_s: float) -> bool:
        """Whether nothing that was seen is left after at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def text(self, number: int = 0) -> str:
        """What a task has printed so far, stdout then stderr."""
        return (self.folder / f"out-{number}.txt").read_text() + (self.folder / f"err-{number}.txt").read_text()

    def wait_for(self, text: str, number: int = 0, limit_s: float = LIMIT_S) -> None:
        """Wait until a task has printed the text."""
        deadline = time.monotonic() + limit_s
        while text not in self.text(number):
            assert time.monotonic() < deadline, f"{text!r} not printed:\n{self.text(number)}"
            assert self.processes[number].poll() is None or text in self.text(number), self.text(number)
            time.sleep(0.05)

    def ends(self, limit_s: float = LIMIT_S) -> list[Ended]:
        """Wait for every task; a task that outlives the limit fails the test."""
        ended = []
        deadline = time.monotonic() + limit_s
        for number, child in enumerate(self.processes):
            while child.poll() is None and time.monotonic() < deadline:
                self.look()
                time.sleep(0.1)
            assert child.returncode is not None, f"task {number} still runs after {limit_s} s:\n{self.text(number)}"
            out = (self.folder / f"out-{number}.txt").read_text()
            err = (self.folder / f"err-{number}.txt").read_text()
            code = 128 - child.returncode if child.returncode < 0 else child.returncode
            ended.append(Ended(code, out, err, time.monotonic() - self.started))
        return ended


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """A signal to this process alone."""
    process.send_signal(number)
