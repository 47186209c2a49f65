"""Saves that are written while training goes on: it waits for the copy to host memory, and for nothing else.

One save is under way at most. The next one waits for it, and is not skipped: a checkpoint that was due is then never
further away than one interval, and a file system that falls behind shows itself as training that stands still.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc.train.checkpoint import Checkpoints, require_plain
from hpc.train.hostcopy import HostCopy

log = logging.getLogger("hpc.train")

NICENESS = 10
"""Of the writing thread: where cores are short, a step goes first (about nine parts of ten)."""
LINGER_S = 60.0
"""How long a run that fails waits for a save that is under way: it is of a step before the failure."""
GUESSED_START_S = 1.0
GUESSED_BYTES_PER_S = 50e6
"""What a save is taken to need before the first one has been measured."""


@dataclass(frozen=True)
class Saved:
    """A save that is durable. `stall_s`: what training stood still for it; `seconds`: from its begin to durable."""

    step: int
    checkpoint: str
    stall_s: float
    seconds: float
    bytes: int


class Saving:
    """The saves of this attempt; rank 0 begins them. A save that failed is raised by `check`, `begin` or `finish`."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: str = "",
        on_saved: Callable[[Saved], None] | None = None,
        expected_bytes: int = 0,
        on_writing: Callable[[bool], None] = lambda is_under_way: None,
    ) -> None:
        """`on_writing`: told True when a save has begun to be written, and False when it is durable or has failed."""
        self.last: Saved | None = None
        """The newest save that is durable."""
        self._checkpoints = checkpoints
        self._config = config
        self._on_saved = on_saved
        self._expected_bytes = expected_bytes
        self._on_writing = on_writing
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._since = 0.0  # when the newest save began

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(
        self,
        step: int,
        model: dict[str, Any],
        trainer: dict[str, Any],
        since: float | None = None,
        *,
        urgent: bool = False,
    ) -> float:
        """Copy the state and leave the writing to a thread; returns how long training stood still for it.

        `since`: when that began, by time.monotonic; now when None. `urgent`: no step is to follow, so none goes first.

        Raises:
            CheckpointError: a value that safe loading would refuse, or the save before this one has failed.
        """
        since = time.monotonic() if since is None else since
        self.finish()
        require_plain(model, "model")
        require_plain(trainer, "trainer")
        model, trainer = self._copy.take((model, trainer))
        stall_s = time.monotonic() - since
        arguments = (step, model, trainer, since, stall_s, urgent)
        self._since = since
        self._on_writing(True)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return stall_s

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step stands."""
        return self._checkpoints.path(step)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the checkpoint of a step is worth.

        Raises:
            ConfigError: the metric that tells the best one is not among them.
        """
        if self._checkpoints.best is not None:
            self._checkpoints.best.note(step, metrics)

    def best(self) -> tuple[str, float, Path] | None:
        """The metric, its value and the path of the best checkpoint, where one is asked for and there is one."""
        best, step = self._checkpoints.best, self._checkpoints.best_step()
        return None if best is None or step is None else (best.metric, best.value(step), self.path(step))

    def check(self) -> None:
        """Raise what a save failed with; called at each step, so it has to be cheap."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Return when no save is under way: all that were begun are durable.

        Raises:
            CheckpointError: one could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """The run fails: let a save that is under way come to its end, if that is soon."""
        if self._thread is not None:
            self._thread.join(LINGER_S)
        if self._error is not None:
            log.error("%s", self._error)
            self._error = None

    def seconds_needed(self) -> float:
        """What a whole save takes, from its begin until it is durable, as the last one did; before that a guess by size.

        The rest of one that is under way comes first.
        """
        guess = GUESSED_START_S + self._expected_bytes / GUESSED_BYTES_PER_S
        whole = guess if self.last is None else self.last.seconds
        return whole + (max(0.0, whole - (time.monotonic() - self._since)) if self.under_way else 0.0)

    def _write(
        self, step: int, model: dict[str, Any], trainer: dict[str, Any], since: float, stall_s: float, urgent: bool
    ) -> None:
        """The thread."""
        try:
            if not urgent:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _niceness())  # Linux: of this thread alone
            path = self._checkpoints.publish(step, model, trainer, self._config)
            seconds = time.monotonic() - since
            size = sum(entry.stat().st_size for entry in os.scandir(path))
            self.last = Saved(step, path.name, stall_s, seconds, size)
            if self._on_saved is not None:
                self._on_saved(self.last)
            self._on_writing(False)
            self._checkpoints.remove_old()
        except BaseException as error:  # raised again in the training's own thread
            self._error = error
        finally:
            self._on_writing(False)


def _niceness() -> int:
    """NICENESS, or what the process has already if that is more: giving it back would need a privilege."""
    return max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))


def expected_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of a checkpoint before there is one: the model, and twice its parameters for the optimizer."""
    sizes = [(tensor.nbytes, tensor.requires_grad) for tensor in tensors]
    return sum(size * (3 if trained else 1) for size, trained in sizes)
