"""The seconds of a step that a rank works by itself, as against those in which it waits for others."""

from __future__ import annotations

import time


class OwnWork:
    """A stopwatch that stands still while the rank may wait for others: in the backward pass, whose gradients are averaged,
    in the sums that are logged, in saves and evaluations. On a GPU it measures what the host does: data, Python, launches.

    Three readings of a clock a step, no synchronisation.
    """

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, time.monotonic()

    def go(self) -> None:
        """What follows is work of its own; what was since the last `stop` was not."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """What follows may wait for others."""
        self._seconds += time.monotonic() - self._since

    def taken(self) -> float:
        """Stop, and return the seconds since the last call."""
        self.stop()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
