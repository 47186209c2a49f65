"""The rank's heartbeat for its agent: which phase it is in, and each step as it is done. No file system, under 2 us."""

from __future__ import annotations

import mmap
import os
import time

from hpc import beats


class Heartbeat:
    """Where this rank writes how far it is. Without an agent that listens it writes into memory of its own."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[: 8 * beats.NUMBERS].cast("d")
        self._numbers[beats.STEP] = -1.0
        self._phase, self._before = "", 0.0
        self.phase("start-up", None)

    @classmethod
    def from_environ(cls) -> Heartbeat:
        """The heartbeat that the agent listens to; none of its users' children inherits the descriptor by an exec."""
        text = os.environ.pop(beats.VARIABLE, "")
        if text.isdecimal():
            try:
                os.set_inheritable(int(text), False)
                return cls(mmap.mmap(int(text), beats.SIZE))
            except (OSError, ValueError):  # a descriptor that this process does not have, or not of that kind
                return cls(bytearray(beats.SIZE))
        return cls(bytearray(beats.SIZE))

    def beat(self, step: int) -> None:
        """So many steps are done. After another phase this is the step phase again."""
        now, numbers = time.monotonic(), self._numbers
        if self._phase != "step":
            self._enter("step", None)
        else:
            took = now - self._before
            numbers[beats.STEP_S] = took if took > numbers[beats.STEP_S] else 0.9 * numbers[beats.STEP_S] + 0.1 * took
        self._before = now
        numbers[beats.STEP] = step
        numbers[beats.BEAT] = now

    def phase(self, name: str, limit_s: float | None) -> None:
        """What comes now takes at most `limit_s` without a beat; None leaves it to launch.hang_timeout_s."""
        self._enter(name, limit_s)
        self._numbers[beats.BEAT] = time.monotonic()

    def _enter(self, name: str, limit_s: float | None) -> None:
        room = beats.NAME.stop - beats.NAME.start
        self._memory[beats.NAME] = name.encode("ascii", "replace")[:room].ljust(room, b"\0")
        self._numbers[beats.LIMIT] = limit_s or 0.0
        self._phase = name
