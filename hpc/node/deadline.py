"""When the agent takes its next step towards the end, and the moment that no step may be later than."""

from __future__ import annotations

import math
import time


class Deadline:
    """The earliest of what was set since the last time that it was taken; none at first."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._last = math.inf  # by Slurm's own end of the job

    def set(self, seconds: float) -> None:
        """From now on; an earlier one that stands is kept."""
        now = time.monotonic()
        due = now + seconds
        if now < self._last:  # what comes after it (another look, say) has its own time
            due = min(due, self._last)
        self._due = due if self._due is None else min(self._due, due)

    def never_after(self, seconds: float) -> None:
        """What is set, now or later, is due by then at the latest."""
        self._last = min(self._last, time.monotonic() + seconds)
        if self._due is not None:
            self._due = min(self._due, self._last)

    def clear(self) -> None:
        self._due = None

    def take(self) -> bool:
        """Whether it is due; then there is none any more."""
        is_due = self._due is not None and time.monotonic() >= self._due
        if is_due:
            self._due = None
        return is_due

    @property
    def is_set(self) -> bool:
        return self._due is not None

    @property
    def left_s(self) -> float | None:
        """Seconds until it is due; None for none."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())
