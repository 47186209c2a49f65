"""The time limit of the allocation: when to begin to stop, so that the agreed stop and a whole save still fit into it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

from hpc.rundir import END_TIME_VARIABLE

log = logging.getLogger("hpc.train")

NOTICE = "TIME"
"""What the notice is called that a run gives itself."""
MARGIN_S = 10.0
"""Left over after the save: for the processes to end, and for the requeue."""
STEPS = 3.0
"""Of the longest ones of late: what ranks may still go through until they have agreed on the stop."""
LOOK_S = 1.0
BEFORE_STEPS = 4
"""Points that come before the second step: up to there it is the set-up that takes its time."""


class TimeLimit:
    """What rank 0 knows of the time. Asked at every point where the run could stop, and at no other cost than a clock."""

    def __init__(self, end_time: float | None, lead_s: float = math.inf) -> None:
        """`lead_s`: slurm.signal_lead_s, to tell when the warning comes too late for a save."""
        self.save_s: Callable[[], float] = lambda: 0.0
        """How long a whole save takes; nothing before there is a state to save."""
        self._ends = math.inf if end_time is None else time.monotonic() + end_time - time.time()
        self._lead_s = lead_s
        self._points, self._before = 0, 0.0
        self._longest = 0.0  # between two points: a step, or a step and what came with it; forgotten by and by
        self._next_look = 0.0
        self._told = False

    @classmethod
    def from_environ(cls, lead_s: float = math.inf) -> TimeLimit:
        """The limit that the controller told; none outside of an allocation."""
        text = os.environ.get(END_TIME_VARIABLE, "")
        try:
            return cls(float(text), lead_s) if text else cls(None)
        except ValueError:
            return cls(None)

    @property
    def is_known(self) -> bool:
        return self._ends < math.inf

    def needed_s(self) -> float:
        """From a notice to the end of the last process, a whole save included."""
        return STEPS * self._longest + self.save_s() + MARGIN_S

    def is_near(self) -> bool:
        """Whether it is time to stop."""
        now = time.monotonic()
        self._points += 1
        if self._points > BEFORE_STEPS:
            self._longest = max(now - self._before, 0.9 * self._longest)
        self._before = now
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        needed = self.needed_s()
        if needed > self._lead_s and self.save_s() > 0 and not self._told:
            self._told = True
            log.warning(
                "the warning comes slurm.signal_lead_s=%g s before the time limit, but a stop and a save take about %.0f s: "
                "stopping earlier by itself; slurm.signal_lead_s=%.0f would do",
                self._lead_s, needed, math.ceil(needed),
            )  # fmt: skip
        return now + LOOK_S + needed >= self._ends
