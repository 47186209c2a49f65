"""Whether the workers of this task still live, as far as it can be seen from outside: stopped ones, and those that hang."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

from hpc import beats
from hpc.beats import Beat

LOOK_S = 1.0
STOPPED_S = 9.0
"""A process that is stopped (SIGSTOP) for longer than this, and than five steps, is as good as dead. With a look each second, and
the time until it is told, that is 10 s."""
STEPS = 5
OTHER_PHASES = 6.0
"""Start-up, saves and evaluations may take so many times longer than a step without a beat."""


class Pulse:
    """The heartbeat of one worker, and the state of its process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpc-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, beats.SIZE)
        self._memory = mmap.mmap(self.descriptor, beats.SIZE)
        self._stopped_for = 0.0

    def beat(self) -> Beat | None:
        return beats.read(self._memory)

    def is_writing_checkpoint(self) -> bool:
        beat = self.beat()
        return beat is not None and beat.is_writing

    def note_output(self) -> None:
        """The worker has printed something, and that is to count as a step."""
        numbers = memoryview(self._memory)[: 8 * beats.NUMBERS].cast("d")
        if numbers[beats.BEAT] <= 0.0:
            numbers[beats.STEP] = -1.0
            self._memory[beats.NAME] = b"step".ljust(beats.NAME.stop - beats.NAME.start, b"\0")
        numbers[beats.BEAT] = time.monotonic()
        numbers.release()

    def close_descriptor(self) -> None:
        """In the agent, once the worker has its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """When the worker has ended and nobody asks for its heartbeat any more."""
        self.close_descriptor()
        self._memory.close()

    def fault(self, pid: int, since_s: float, watched_s: float, hang_timeout_s: float) -> str | None:
        """What is wrong with the worker, in words; None when nothing is.

        `since_s`: since the last look; `watched_s`: how long this has been watched without a break: a machine that slept,
        or a job that was suspended as a whole, is no worker that hangs. `hang_timeout_s` 0: hangs are not looked for.
        """
        beat = self.beat()
        step_s = beat.step_s if beat is not None else 0.0
        self._stopped_for = self._stopped_for + since_s if is_stopped(pid) else 0.0
        where = _where(beat)
        if self._stopped_for > max(STOPPED_S, STEPS * step_s):
            return f"stopped (as by SIGSTOP) for {self._stopped_for:.0f} s{where}"
        if beat is None or hang_timeout_s <= 0:
            return None
        limit = beat.limit_s or hang_timeout_s * (1.0 if beat.phase == "step" else OTHER_PHASES)
        if min(beat.age_s, watched_s) > max(limit, STEPS * step_s):
            return f"hung: no sign of life for {beat.age_s:.0f} s{where}"
        return None


@dataclass
class Watch:
    """The clock of the looks: how long since the last one, and since when there was no break."""

    last: float = 0.0
    begun: float = 0.0

    def look(self) -> tuple[float, float] | None:
        """Seconds since the last look and since the watch began; None when it is too early for another."""
        now = time.monotonic()
        if now - self.last < LOOK_S:
            return None
        since, self.last = now - self.last, now
        if since > 5 * LOOK_S:
            self.begun, since = now, 0.0
        return since, now - self.begun


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal; not one that a debugger holds. Source: proc_pid_stat(5), "T" and "t"."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


def _where(beat: Beat | None) -> str:
    if beat is None:
        return ""
    return f", phase {beat.phase}, " + ("before the first step" if beat.step is None else f"after step {beat.step}")
