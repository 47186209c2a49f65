"""What an agent does for a clean node: before its workers start, and when they have ended."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc.node import gpus, processes
from hpc.node.belonging import start_number
from hpc.node.environment import TaskEnvironment
from hpc.node.gpus import Gpu
from hpc.node.processes import Mark
from hpc.node.residue import Folder, agents_prefix
from hpc.node.sentinel import Sentinel, remove_residue
from hpc.node.sweep import Sweeper

ANSWER_S = 5.0
"""How long Slurm may take to say which jobs live; without its answer nothing of other jobs is ended."""
GPU_WAIT_S = 30.0
"""How long an agent waits for the memory of its GPUs; then the workers start all the same."""
LOOK_S = 0.25


class Tidy:
    """One agent's care for its node: what was left before it, a folder of its own, and who watches over its end."""

    def __init__(self, task: TaskEnvironment, note: Callable[[str], None]) -> None:
        self._task, self._note = task, note
        self._sentinel: Sentinel | None = None
        self._ended = False
        self.folder: Path | None = None
        """For what only this start of the step needs: compiled kernels, temporary files."""

    def begin(self) -> None:
        """Before torch is imported: the folder, the sentinel, and an end to leftovers (by the node's first task)."""
        self.folder = self._make_folder()
        self._sentinel = Sentinel.start(self.folder)
        if self._task.local_task == 0:
            end_leftovers(os.environ, self._note)

    def wait_for_gpus(self) -> None:
        """Right before workers are started."""
        if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ:  # with it, Slurm lets jobs share a GPU
            wait_for_gpus(self._task.visible_gpus, self._note)

    def end(self) -> None:
        """All workers and their children have ended: nothing stays of them. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        remove_residue(_ignore)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._sentinel is not None:
            self._sentinel.dismiss()

    def _make_folder(self) -> Path | None:
        own, agent = processes.mark_of(os.environ), processes.look_at(os.getpid())
        if own is not None:
            prefix = Folder(
                cluster=own.cluster,
                job_id=own.job_id,
                restarts=own.restarts,
                start=start_number(own) if own.start else 0,
            ).prefix
        elif agent is not None:
            prefix = agents_prefix(agent)
        else:
            return None  # nobody could tell when it may be removed
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
            (folder / f"task-{self._task.task_rank}").touch()
            return folder
        except OSError as error:
            self._note(f"no folder for temporary files can be made: {error}")
            return None


def end_leftovers(environ: Mapping[str, str], note: Callable[[str], None]) -> None:
    """End what this user's jobs that are over have left on this node; outside of a Slurm task nothing is done."""
    if processes.mark_of(environ) is None:
        return
    sweeper = Sweeper(environ, answer_s=ANSWER_S)
    view = sweeper.look(ask_gpus=False)
    for text in view.notes if view.unknown else ():
        note(text)
    if not (view.leftovers or view.residue):
        return
    for process in sweeper.end(view):
        job = process.mark.job_id if process.mark else "?"
        command = " ".join(process.command)[:100]
        note(f"ended a leftover of job {job}: pid {process.pid}, {process.age_s:.0f} s old, {command}")
    if view.residue:
        note(f"removed {len(view.residue)} files of dead processes, {sum(one.size for one in view.residue) >> 20} MiB")


def wait_for_gpus(names: Sequence[str], note: Callable[[str], None], limit_s: float = GPU_WAIT_S) -> None:
    """Wait until nobody but this job step holds these GPUs, at most so long; then say who does.

    Without a driver there is nothing to wait for. Processes of the same step (other tasks' workers) do not count.
    """
    deadline = time.monotonic() + limit_s
    told = False
    while True:
        held = [gpu for gpu in map(_without_own_step, gpus.ask(names, _ignore)) if gpu is not None]
        if not held:
            return
        if time.monotonic() >= deadline:
            break
        if not told:
            told = True
            note(f"waiting for GPU memory: {'; '.join(map(describe, held))}")
        time.sleep(LOOK_S)
    note(f"warning: after {limit_s:.0f} s still {'; '.join(map(describe, held))}; the workers start all the same")


def _without_own_step(gpu: Gpu) -> Gpu | None:
    """What others hold of it; None for nothing."""
    own = processes.mark_of(os.environ)
    others = {}
    for pid, size in gpu.holders.items():
        process = processes.look_at(pid)
        if process is None or process.mark is None or _step(process.mark) != _step(own):
            others[pid] = size
    if others:
        return replace(gpu, holders=others)
    return gpu if not gpu.holders and gpu.used_mib >= gpus.FREE_MIB else None


def _step(mark: Mark | None) -> tuple[str, int, str, str] | None:
    return None if mark is None else (mark.job_id, mark.restarts, mark.step_id, mark.start)


def describe(gpu: Gpu) -> str:
    """Who holds a GPU, in words."""
    if not gpu.holders:
        return f"GPU {gpu.name} has {gpu.used_mib} MiB in use by no process that the driver names"
    return f"GPU {gpu.name} is held by " + ", ".join(_holder(pid, size) for pid, size in sorted(gpu.holders.items()))


def _holder(pid: int, size_mib: int) -> str:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return f"pid {pid} ({size_mib} MiB; not visible from here)"
    if owner != os.getuid():
        return f"pid {pid} of user id {owner} ({size_mib} MiB)"
    process = processes.look_at(pid)
    job = f", job {process.mark.job_id}" if process is not None and process.mark is not None else ", no job's"
    return f"pid {pid} of yours ({size_mib} MiB{job})"


def _ignore(text: str) -> None:
    """preflight and the cores' order have said what is wrong with the driver."""
