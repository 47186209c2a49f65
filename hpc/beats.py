"""A worker's heartbeat: a few numbers in memory that it shares with its agent. The layout, how to write it, how to read it.

The memory is a descriptor that the worker inherits; its number stands in HPC_HEARTBEAT. Times are time.monotonic's, which
all processes of a machine share. A script of yours beats with one call a step:

    from hpc.beats import beat
    for batch in loader:
        ...
        beat()

From the first call on, its agent ends the step when no beat comes for launch.hang_timeout_s.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from typing import Any

VARIABLE = "HPC_HEARTBEAT"
STACKS_VARIABLE = "HPC_STACKS"
"""The number of the descriptor that the worker writes its Python stacks to when STACKS_SIGNAL comes."""
STACKS_SIGNAL: int = signal.SIGRTMAX - 7
"""A real-time signal, so that it is none of those that programs, libraries or Slurm use."""
SIZE = 4096
NUMBERS = 7
"""Doubles from the start on: time of the last beat, newest step (-1: none), seconds of a step, limit of the phase (0: none),
seconds of this rank's own work in all steps it has measured (not waiting for other ranks), how many steps those are, and
whether it is writing a checkpoint beside its steps (1, else 0)."""
BEAT, STEP, STEP_S, LIMIT, WORK, MEASURED, WRITING = range(NUMBERS)
NAME = slice(64, 96)
"""The name of the phase, ASCII, filled up with zeros."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a worker has said of itself last."""

    step: int | None
    """Optimizer steps that are done, over the whole run; None before the first one."""
    phase: str
    age_s: float
    """Since the last beat, or the beginning of the phase."""
    step_s: float
    """What a step takes, 0 when nobody knows."""
    limit_s: float | None
    """How long this phase may take without a beat; None: as agreed on for all."""
    work_s: float = 0.0
    """Seconds of work of its own in all steps that it has measured."""
    measured: int = 0
    """How many steps those are."""
    is_writing: bool = False
    """A checkpoint, while steps go on."""


def read(memory: Any) -> Beat | None:
    """The beat in a shared memory; None when the worker has never written one."""
    beat, step, step_s, limit, work, measured, writing = struct.unpack_from(f"={NUMBERS}d", memory)
    if beat <= 0.0:
        return None
    name = bytes(memory[NAME]).rstrip(b"\0").decode("ascii", "replace")
    return Beat(
        step=int(step) if step >= 0 else None,
        phase=name,
        age_s=max(0.0, time.monotonic() - beat),
        step_s=max(0.0, step_s),
        limit_s=limit if limit > 0 else None,
        work_s=max(0.0, work),
        measured=max(0, int(measured)),
        is_writing=writing > 0,
    )


class Heartbeat:
    """Where this rank writes how far it is. Without an agent that listens it writes into memory of its own.

    No file system, under 2 us a step.
    """

    def __init__(self, memory: mmap.mmap | bytearray, phase: str = "start-up") -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[: 8 * NUMBERS].cast("d")
        self._numbers[STEP] = -1.0
        self._phase, self._before = "", 0.0
        self.phase(phase, None)

    @classmethod
    def from_environ(cls, phase: str = "start-up") -> Heartbeat:
        """The heartbeat that the agent listens to; none of its users' children inherits the descriptor by an exec."""
        text = os.environ.pop(VARIABLE, "")
        if text.isdecimal():
            try:
                os.set_inheritable(int(text), False)
                return cls(mmap.mmap(int(text), SIZE), phase)
            except (OSError, ValueError):  # a descriptor that this process does not have, or not of that kind
                return cls(bytearray(SIZE), phase)
        return cls(bytearray(SIZE), phase)

    def beat(self, step: int, work_s: float | None = None) -> None:
        """So many steps are done, and this took the rank `work_s` without its waits for others, if that is known.

        After another phase this is the step phase again.
        """
        now, numbers = time.monotonic(), self._numbers
        if self._phase != "step":
            self._enter("step", None)
        else:
            took = now - self._before
            numbers[STEP_S] = took if took > numbers[STEP_S] else 0.9 * numbers[STEP_S] + 0.1 * took
        if work_s is not None:
            numbers[WORK] += work_s
            numbers[MEASURED] += 1
        self._before = now
        numbers[STEP] = step
        numbers[BEAT] = now

    def phase(self, name: str, limit_s: float | None) -> None:
        """What comes now takes at most `limit_s` without a beat; None leaves it to launch.hang_timeout_s."""
        self._enter(name, limit_s)
        self._numbers[BEAT] = time.monotonic()

    def writing(self, is_under_way: bool) -> None:
        """A checkpoint is being written beside the steps, or is no longer: its agent lets it be finished."""
        self._numbers[WRITING] = float(is_under_way)

    def _enter(self, name: str, limit_s: float | None) -> None:
        room = NAME.stop - NAME.start
        self._memory[NAME] = name.encode("ascii", "replace")[:room].ljust(room, b"\0")
        self._numbers[LIMIT] = limit_s or 0.0
        self._phase = name


_of_this_process: Heartbeat | None = None
_beats = 0


def beat(step: int | None = None) -> None:
    """Tell the agent that this script has done a step: the one after the last, or number `step`.

    Before a long save or evaluation call `phase("save", 900)`. Without an agent both do nothing that anybody sees.
    """
    global _beats
    _beats = _beats + 1 if step is None else step
    _mine().beat(_beats)


def phase(name: str, limit_s: float | None = None) -> None:
    """Tell the agent that something else than steps comes now, which may take `limit_s` (None: six times as long as a step
    may) without a beat; the next `beat` ends it."""
    _mine().phase(name, limit_s)


def _mine() -> Heartbeat:
    global _of_this_process
    if _of_this_process is None:
        show_stacks_on_request()
        _of_this_process = Heartbeat.from_environ()
    return _of_this_process


def show_stacks_on_request() -> None:
    """Have STACKS_SIGNAL write the Python stacks of all threads to the descriptor that HPC_STACKS names, if it does.

    The handler is C code that needs no lock of the interpreter: it answers from inside a collective that never ends.
    Source: the Python documentation of faulthandler.register.
    """
    text = os.environ.pop(STACKS_VARIABLE, "")
    if not text.isdecimal():
        return
    try:
        os.set_inheritable(int(text), False)
        faulthandler.register(STACKS_SIGNAL, file=int(text), all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return
