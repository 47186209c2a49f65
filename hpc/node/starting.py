"""From one task's share of a node to running workers: cores, the preload, the environment, the fork."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals

from hpc import beats, exitcodes
from hpc.errors import NoRoom, printable
from hpc.node import preload, signals
from hpc.node.assembly import Assembly, Go
from hpc.node.cores import allowed_cores, cores_near_gpus, share_cores
from hpc.node.environment import TaskEnvironment
from hpc.node.pulse import Pulse
from hpc.node.settings import AgentSettings
from hpc.node.signals import FORWARDED, SignalPipe
from hpc.node.stacks import StackMemory
from hpc.node.streams import RankLog, WorkerStream, open_log
from hpc.node.tidy import Tidy
from hpc.node.worker import ERROR_FILE_VARIABLE, Start
from hpc.ranks import RankInfo
from hpc.rundir import SECRET_VARIABLE

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass
class Worker:
    """One running worker, as its agent sees it."""

    info: RankInfo
    pid: int
    streams: list[WorkerStream]
    log: Path | None
    open_log: RankLog | None
    error_file: Path | None
    pulse: Pulse
    stacks: StackMemory
    ended_by_us: bool = False
    fault: str | None = None
    """Why its agent has ended it: stopped, or hung."""
    code: int | None = None

    def kill(self) -> None:
        """Kill its process group. It is a child of the agent, not yet waited for: the number cannot be another's."""
        try:
            os.killpg(self.pid, SIGKILL)
        except ProcessLookupError:  # a fork that leads no session yet
            os.kill(self.pid, SIGKILL)

    def close(self) -> None:
        """In its agent, when it has ended and nobody asks about it any more."""
        self.stacks.close()
        self.pulse.close()
        if self.open_log is not None:
            self.open_log.close()


class Starter:
    """Starts the workers of one task, all alike but for their rank and their cores."""

    def __init__(
        self,
        task: TaskEnvironment,
        settings: AgentSettings,
        assembly: Assembly,
        tidy: Tidy,
        *,
        folder: Path | None,
        warnings: Sequence[Signals],
        note: Callable[[str], None],
    ) -> None:
        """`folder`: where the attempt's logs go, if anywhere; `warnings`: the signals that workers are to bear."""
        self._task, self._settings, self._assembly, self._tidy = task, settings, assembly, tidy
        self._folder, self._warnings, self._note = folder, tuple(warnings), note
        self._environ_before = dict(os.environ)  # torch's import sets variables of its own: workers get the user's
        self.target = settings.target()

    def shares(self) -> list[list[int]]:
        """The cores of each worker: equal shares of those that this task may use, those near its GPU first."""
        allowed = allowed_cores()
        asked = self._settings.cores_asked
        if asked is not None and len(allowed) < asked:
            self._note(f"{len(allowed)} cores may be used here although {asked} were asked for: look at --cpus-per-gpu")
        gpus = self._task.visible_gpus
        if len(gpus) >= self._task.workers:
            near = cores_near_gpus(gpus, self._note)[: self._task.workers]
        else:
            near = [frozenset()] * self._task.workers
        shares = share_cores(allowed, near)
        if self._task.workers > 1:
            sizes = sorted({len(share) for share in shares})
            self._note(f"{len(allowed)} cores for {self._task.workers} workers, {'-'.join(map(str, sizes))} each")
        return shares

    def preload(self, threads: int) -> bool:
        """Import what the workers need; True when they can be forked from here."""
        # libgomp reads it when torch is loaded
        self._environ_before.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        os.environ["OMP_NUM_THREADS"] = self._environ_before["OMP_NUM_THREADS"]
        if self.target.kind == "program" or not self._settings.fork:
            return False
        for name in CACHES:
            if (place := self._own_place(name)) is not None:
                os.environ.setdefault(name, str(place))  # torch makes the one for kernels when it is imported
        optional: list[str] = []
        if self.target.is_training:
            job = self._settings.job or "jobs.digits"
            optional = ["hpc.config", "hpc.train.start", f"{job}.job"]
        return preload.import_modules(self._settings.preload, optional, self._note)

    def start_all(
        self,
        go: Go,
        cores: Sequence[list[int]],
        agreed: Mapping[str, str],
        *,
        run_id: str,
        fork: bool,
        pipe: SignalPipe,
    ) -> tuple[list[Worker], NoRoom | None] | Start:
        """Start this task's workers, as the meeting has agreed.

        Returns them in the agent, with what kept the next one from being started, if anything did. In a new process that
        is a fork of this one it returns what to become.

        Args:
            cores: those of each worker.
            agreed: variables of all ranks.
            pipe: the agent's signals; a new process lets go of them.
        """
        workers: list[Worker] = []
        for info, share in zip(go.infos, cores, strict=True):
            ranks = info.to_environ(go.rendezvous, run_id=run_id, attempt=self._assembly.attempt)
            try:
                started = self._start(info, share, {**ranks, **go.environ, **agreed}, fork, pipe, workers)
            except OSError as error:
                return workers, NoRoom(f"rank {info.rank}", error, rank=info.rank)
            if isinstance(started, Start):
                return started
            workers.append(started)
        return workers, None

    def _start(
        self,
        info: RankInfo,
        cores: list[int],
        environ: Mapping[str, str],
        fork: bool,
        pipe: SignalPipe,
        others: Sequence[Worker],
    ) -> Worker | Start:
        """One worker; the new process lets go of the signals and of the `others` so far.

        Raises:
            OSError: there is no room for it; nothing of it is left.
        """
        prefix = f"[rank {info.rank}] ".encode() if info.world_size > 1 else b""
        with contextlib.ExitStack() as undo:
            log = open_log(self._folder, info.rank, self._assembly.clock_offset_s)
            if log is not None:
                undo.callback(log.close)
            streams = []
            for screen in (1, 2):
                streams.append(WorkerStream(log, screen, prefix))
                undo.callback(streams[-1].close)
            name = f"error-{info.rank}.json"
            error_file = self._folder / name if self._folder is not None and log is not None else None
            pulse = Pulse()
            undo.callback(pulse.close)
            stacks = StackMemory()
            undo.callback(stacks.close)
            shared = {beats.VARIABLE: str(pulse.descriptor), beats.STACKS_VARIABLE: str(stacks.descriptor)}
            start = Start(
                target=self.target,
                environ={**self._environ(cores, environ, error_file), **shared},
                cores=cores,
                stdout=streams[0].writer,
                stderr=streams[1].writer,
                shared=(pulse.descriptor, stacks.descriptor),
                agent=os.getpid(),
                warnings=self._warnings,
            )
            signals.hold({*FORWARDED, *self._warnings})
            try:
                pid = os.fork()
            except OSError:
                signals.release()
                raise
            undo.pop_all()
        if pid == 0:
            self._in_worker(
                start, fork, pipe, [*streams, *(stream for worker in others for stream in worker.streams)], others
            )
            return start
        signals.release()
        pulse.close_descriptor()
        for stream in streams:
            stream.close_writer()
        path = self._folder / f"rank-{info.rank}.log" if self._folder is not None and log is not None else None
        return Worker(info, pid, streams, path, log, error_file, pulse, stacks)

    def _in_worker(
        self, start: Start, fork: bool, pipe: SignalPipe, streams: Sequence[WorkerStream], others: Sequence[Worker]
    ) -> None:
        """In the new process: let go of all that is the agent's; returns when the worker is to run in this fork."""
        try:
            pipe.close()
            start.enter()
            self._assembly.close()
            for stream in streams:
                stream.close()
            for worker in others:
                worker.stacks.close()
                if worker.open_log is not None:
                    worker.open_log.close()
            if fork:
                return
            argv = start.target.argv(sys.executable)
            if self._settings.code is not None and not self._settings.command:
                os.chdir(self._settings.code)
            try:
                os.execvpe(argv[0], argv, dict(start.environ))
            except OSError as error:
                print(f"hpc.node: cannot run {printable(argv[0])}: {error.strerror}", file=sys.stderr, flush=True)
                os._exit(126 if isinstance(error, PermissionError) else 127)
        except BaseException as error:
            print(f"hpc.node: a worker could not be set up: {error!r}", file=sys.stderr, flush=True)
            os._exit(exitcodes.UNAVAILABLE)

    def _environ(self, cores: list[int], more: Mapping[str, str], error_file: Path | None) -> dict[str, str]:
        environ = {name: value for name, value in self._environ_before.items() if name != SECRET_VARIABLE}
        environ.update(more)
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun sets it
        environ.setdefault("PYTHONUNBUFFERED", "1")
        environ["HPC_CORES"] = str(len(cores))
        if error_file is not None:
            environ[ERROR_FILE_VARIABLE] = str(error_file)
        if environ.get("TMPDIR") == "/tmp":
            del environ["TMPDIR"]  # Slurm sets it so; a place that the site or the user chose is another one
        for name in (*CACHES, "TMPDIR"):
            place = self._own_place(name)
            if place is not None and environ.setdefault(name, str(place)) == str(place):
                try:
                    place.mkdir(mode=0o700, exist_ok=True)
                except OSError as error:  # a full disk, most likely: the library's own place may be another one
                    self._note(f"no {name} can be made ({error}); it is left to its library")
                    del environ[name]
        return environ

    def _own_place(self, name: str) -> Path | None:
        """On this node, and gone after the start: in a shared home compiled kernels go stale under their feet."""
        return None if self._tidy.folder is None else self._tidy.folder / name.split("_")[0].lower()
