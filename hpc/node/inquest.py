"""What an agent finds out about its workers' ends: each failure with its place, and the stacks of all ranks at a hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.errors import NoRoom
from hpc.node import stacks
from hpc.node.clock import Clock
from hpc.node.environment import TaskEnvironment
from hpc.node.memory import OomWatch
from hpc.node.outcome import LOADER_KILLED, Failure, read_traceback, write_outcome
from hpc.node.stacks import Stack
from hpc.node.starting import Worker
from hpc.rundir import read_error_file

TRACEBACK_LIMIT = 16 * 1024
"""Characters of a message, and of a traceback: what an agent tells of a failure has to fit into one message of the meeting."""


class Inquest:
    """One agent's findings; on rank zero's agent those of all others come in, too. Times are by rank zero's clock."""

    def __init__(self, task: TaskEnvironment, host: str, note: Callable[[str], None]) -> None:
        self.clock = Clock()
        self.summary = ""
        """What all ranks did at a hang, in one line; empty before anybody hung."""
        self._task, self._host, self._note = task, host, note
        self._oom = OomWatch()
        self._own: list[Stack] = []
        self._all: dict[int, Stack] = {}
        self._answered: set[int] = set()
        self._asked = False

    # ---- failures --------------------------------------------------------------------------------------------------

    def ended(self, worker: Worker) -> Failure:
        """The failure of a worker that has ended with a code that is no good one."""
        assert worker.code is not None
        message, trace, moment = read_error_file(worker.error_file) if worker.error_file else ("", "", None)
        failed_by_itself = bool(message) and worker.ended_by_us
        if not message and worker.log is not None and 0 < worker.code < 128 and not worker.ended_by_us:
            message, trace = read_traceback(worker.log)
        code = exitcodes.FAILED if failed_by_itself else worker.code
        oom = None
        if code == 128 + 9 and not worker.ended_by_us:
            oom = self._oom.evidence(worker.pid)
        elif LOADER_KILLED.search(f"{message}\n{trace}"):
            oom = self._oom.evidence(None)
        words = exitcodes.describe(code) if oom is None or message else f"killed by SIGKILL, {oom}"
        return replace(
            self._failure(worker, code, message[:TRACEBACK_LIMIT] or words),
            time=moment + self.clock.offset_s if moment else self.clock.now(),
            traceback=trace[-TRACEBACK_LIMIT:],
            by_us=worker.ended_by_us and not failed_by_itself,
            oom=oom or "",
        )

    def hung(self, worker: Worker) -> Failure:
        """The failure of a worker that is stopped or hangs; who was silent first is the cause."""
        beat = worker.pulse.beat()
        silent_s = beat.age_s if beat is not None else 0.0
        failure = self._failure(worker, exitcodes.HUNG, worker.fault or "")
        return replace(failure, time=self.clock.now() - silent_s, hung=True)

    def never(self, error: NoRoom) -> Failure:
        """The failure of a worker that this machine had no room for."""
        code, now = error.exit_code, self.clock.now()
        return Failure(rank=error.rank, host=self._host, code=code, time=now, message=str(error))

    def lost(self, rank: int, host: str, *, silent: bool) -> Failure:
        """The failure of a whole node, or of its agent alone."""
        how = "its node does not answer" if silent else "its node was lost, or the agent was killed"
        message = f"the agent on {host} is gone: {how}"
        code = exitcodes.UNAVAILABLE
        return Failure(rank=rank, host=host, code=code, time=self.clock.now(), message=message, silent=silent)

    def _failure(self, worker: Worker, code: int, message: str) -> Failure:
        beat = worker.pulse.beat()
        return Failure(
            rank=worker.info.rank,
            host=self._host,
            code=code,
            time=self.clock.now(),
            message=message,
            log=str(worker.log or ""),
            gpu=self._gpu(worker),
            step=beat.step if beat is not None else None,
        )

    def _gpu(self, worker: Worker) -> str | None:
        gpus, device = self._task.visible_gpus, worker.info.device_index
        return gpus[device] if device is not None and device < len(gpus) else None

    # ---- stacks ----------------------------------------------------------------------------------------------------

    def ask(self, workers: Sequence[Worker]) -> list[Stack] | None:
        """The stacks of this task's workers, before anybody is ended; None when they have been asked before."""
        if self._asked:
            return None
        self._asked = True
        alive = {one.info.rank: one for one in workers if one.code is None}
        found = stacks.collect({rank: (one.pid, one.stacks) for rank, one in alive.items()})
        for rank, (text, words, frames) in sorted(found.items()):
            beat = alive[rank].pulse.beat()
            self._own.append(
                Stack(
                    rank=rank,
                    host=self._host,
                    words=words,
                    waits=stacks.waits(words),
                    frames=tuple(frames),
                    text=text,
                    log=str(alive[rank].log or ""),
                    gpu=self._gpu(alive[rank]),
                    step=beat.step if beat is not None else None,
                )
            )
        self.hear(self._task.task_rank, self._own)
        return self._own

    def hear(self, task: int, found: Sequence[Stack | Mapping[str, Any]]) -> None:
        """Rank zero's agent: what another one has found."""
        self._answered.add(task)
        for one in found:
            stack = one if isinstance(one, Stack) else Stack.from_dict(one)
            self._all[stack.rank] = stack

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to wait for: every task has answered."""
        return len(self._answered) == self._task.tasks

    def conclude(self, failures: Sequence[Failure]) -> list[Failure]:
        """The same failures after a hang, with the rank that the others wait for as the first of all, where stacks tell."""
        if not self._all or not any(one.hung for one in failures):
            return list(failures)
        groups = stacks.groups_of(self._all.values())
        self.summary = "; ".join(map(str, groups))
        self._note(f"stacks: {self.summary}")
        stopped = [one for one in failures if one.hung and one.message.startswith("stopped")]
        guilty = [] if stopped else [rank for rank in stacks.culprits(groups) if rank in self._all]
        others = [self._with_stack(one) if one.hung else one for one in failures]
        if not guilty:
            return others
        earliest = min(one.time for one in failures)
        known = {one.rank: one for one in others if one.hung}
        first = next((known[rank] for rank in guilty if rank in known), None)
        if first is None:
            stack = self._all[guilty[0]]
            waiting = "; ".join(str(group) for group in groups if stack.rank not in group.ranks)
            message = f"hung {stack.words}, while others wait: {waiting}"
            first = self._with_stack(
                Failure(
                    rank=stack.rank,
                    host=stack.host,
                    code=exitcodes.HUNG,
                    time=earliest,
                    message=message,
                    log=stack.log,
                    hung=True,
                    gpu=stack.gpu,
                    step=stack.step,
                )
            )
        return [
            replace(first, time=earliest - 0.001),
            *(one for one in others if one.rank != first.rank or not one.hung),
        ]

    def _with_stack(self, failure: Failure) -> Failure:
        stack = self._all.get(failure.rank)
        frames = () if stack is None else stack.frames
        trace = "\n".join(("Stack of the main thread (most recent call last):", *frames)) if frames else ""
        return replace(failure, traceback=failure.traceback or trace, stacks=self.summary)

    def write(self, folder: Path | None, attempt: int, restart: int | None) -> None:
        """Put the stacks into the run directory, at the end, when a shared disk that hangs can delay nothing more."""
        if folder is None or not self._own:
            return
        summary = None
        if self.summary:
            lines = []
            for group in stacks.groups_of(self._all.values()):
                lines += [str(group), *self._all[group.ranks[0]].frames]
            summary = "\n".join(lines)
        try:
            start = f"attempt {attempt}" + (f", restart {restart}" if restart else "")
            stacks.write_files(folder, start, self._own, summary)
        except OSError as error:
            self._note(f"the stacks could not be written: {error}")

    def write_outcome(self, folder: Path, outcome: Mapping[str, Any]) -> None:
        """Tell the controller how the step has ended."""
        try:
            write_outcome(folder, outcome)
        except OSError as error:
            self._note(f"the outcome could not be written: {error}")
