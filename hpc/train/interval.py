"""How often to save: an interval from what a save costs and how often the run fails (Young, CACM 1974; Daly, FGCS 2006).

A run that saves every d seconds at a cost of c each, and fails every M seconds on average, loses c/d + d/(2M) of its
time; that is least at d = sqrt(2 c M). Nothing here needs torch, and all but `Plan` and `Pace` are pure functions.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc import exitcodes

log = logging.getLogger("hpc.train")

FAILURES_PER_NODE_DAY = 6.5e-3
"""Of a large research cluster (RSC-1). Source: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
Research Clusters", HPCA 2025."""
MOST_OVERHEAD = 0.02
"""The share of the time that saving may take, however often the run fails."""
DEAR = 0.05
"""The share of the time from which on a given interval is warned of."""
GOOD_ENDS = (exitcodes.DONE, exitcodes.WANTS_ANOTHER_ATTEMPT)
FIRST_S = 30.0
"""When the first save is due that nothing is known of: soon, since it has to be measured, and a start may fail early."""
SLOWED = 0.1
"""What a save is taken to slow training by while it is written, as a share of that time, before it has been measured."""
CHANGED = 1.5
"""The factor by which an interval has to change to be told again."""


@dataclass(frozen=True)
class History:
    """What a run's record tells: seconds that it ran, starts that ended badly, and the newest save that was measured."""

    seconds: float = 0.0
    failures: int = 0
    cost_s: float | None = None
    save_s: float | None = None


def history(events: Iterable[Mapping[str, Any]]) -> History:
    """What the events of a record tell of the starts before this one, which has noted nothing yet.

    A start has ended badly when it neither agreed on a stop nor left with a good exit code. It ran until the controller saw
    its end, else until the last that was heard of it.
    """
    seconds, failures = 0.0, 0
    cost_s = save_s = None
    began: float | None = None
    last, stopped = 0.0, False
    for event in events:
        kind, time = event.get("event"), event.get("time")
        if not isinstance(time, (int, float)):
            continue
        if kind == "resumed":
            if began is not None:
                seconds, failures = seconds + max(0.0, last - began), failures + (not stopped)
            began, last, stopped = time, time, False
        elif kind in ("first_step", "saved", "ended", "stopping"):
            well = kind == "stopping" or (kind == "ended" and event.get("code") in GOOD_ENDS)
            last, stopped = time, stopped or well
        if kind == "saved" and isinstance(event.get("seconds"), float) and isinstance(event.get("stall_s"), float):
            save_s = event["seconds"]
            cost_s = event["stall_s"] + SLOWED * save_s
    if began is not None:
        seconds, failures = seconds + max(0.0, last - began), failures + (not stopped)
    return History(seconds, failures, cost_s, save_s)


def mttf_s(nodes: int, seconds: float, failures: int) -> float:
    """The mean time between failures: what was seen, blended with what such a cluster is known for.

    At first the known rate counts for as much as one failure in its time. With each failure that was seen it counts for a
    tenth of that: several in an hour say that this cluster, or this program, is not like that one.
    """
    known = 86400.0 / (FAILURES_PER_NODE_DAY * max(1, nodes))
    weight = 10.0 ** -min(failures, 12)
    return (seconds + weight * known) / (failures + weight)


def interval_s(cost_s: float, mttf: float, save_s: float = 0.0) -> float:
    """The best interval between saves, but none that costs more than MOST_OVERHEAD or is shorter than a save takes."""
    return max(math.sqrt(2 * cost_s * mttf), cost_s / MOST_OVERHEAD, save_s)


def first_s(past: History) -> float:
    """When the first save is due while no save has been measured; sooner where starts have failed already."""
    if past.failures == 0:
        return FIRST_S
    return max(1.0, min(FIRST_S, past.seconds / past.failures / 10))


class Pace:
    """How long steps take without a save, and how much longer those were while the last one was written."""

    def __init__(self, now: float) -> None:
        self.step_s = 0.0
        self._before = now
        self._was_saving = False
        self._slow_steps, self._slow_s = 0, 0.0

    def restart(self, now: float) -> None:
        """What was done until now was no step."""
        self._before = now

    def save_begins(self) -> None:
        self._slow_steps, self._slow_s, self._was_saving = 0, 0.0, True

    def step(self, now: float, saving: bool) -> None:
        """A step has ended; `saving`: a save is under way. Called at each step, so it has to be cheap."""
        seconds, self._before = now - self._before, now
        if saving or self._was_saving:
            self._slow_steps += 1
            self._slow_s += seconds
        elif self.step_s:
            self.step_s += 0.05 * (seconds - self.step_s)
        else:
            self.step_s = seconds
        self._was_saving = saving

    def slowed_s(self) -> float:
        """The time by which the last save has made steps longer."""
        return max(0.0, self._slow_s - self._slow_steps * self.step_s) if self.step_s else 0.0


class Plan:
    """When rank 0 wants to save next, in steps; it tells the others at logged steps."""

    def __init__(self, now: float, past: History, nodes: int, every_s: float | None = None) -> None:
        """`every_s`: the interval, if it is given; 0 or infinity: no saves in between. None: chosen here."""
        self._began = self._saved_at = now
        self._past = past
        self._nodes = nodes
        self._given = every_s
        self._costs = [past.cost_s] if past.cost_s is not None else []
        self._save_s = past.save_s or 0.0
        self._told: float | None = None

    def save_begins(self, now: float) -> None:
        self._saved_at = now

    def measured(self, cost_s: float, save_s: float) -> None:
        """A save has ended: training lost `cost_s` by it, and it was durable `save_s` after its begin."""
        self._costs = [*self._costs[-4:], cost_s]
        self._save_s = save_s

    @property
    def cost_s(self) -> float | None:
        """What a save costs: the median of the last few."""
        return statistics.median(self._costs) if self._costs else None

    def mttf_s(self, now: float) -> float:
        return mttf_s(self._nodes, self._past.seconds + now - self._began, self._past.failures)

    def interval_s(self, now: float) -> float:
        """Seconds between the begins of two saves; infinity for none."""
        if self._given is not None:
            return self._given or math.inf
        cost = self.cost_s
        return first_s(self._past) if cost is None else interval_s(cost, self.mttf_s(now), self._save_s)

    def next_step(self, step: int, now: float, step_s: float) -> int:
        """The step to save after, `step` (just done) or a later one; 0 for none that can be told yet."""
        wait = self._saved_at + self.interval_s(now) - now
        if wait <= 0:
            return step
        if not step_s or wait == math.inf:
            return 0
        return step + math.ceil(wait / step_s)

    def news(self, now: float, step_s: float) -> str | None:
        """The line that tells the interval that was chosen; None when there is nothing new."""
        cost, seconds = self.cost_s, self.interval_s(now)
        if self._given is not None or cost is None or not step_s:
            return None
        if self._told is not None and 1 / CHANGED < seconds / self._told < CHANGED:
            return None
        self._told = seconds
        return (
            f"saving every {max(1, round(seconds / step_s))} steps (about {_about(seconds)}): a save costs {_about(cost)} "
            f"and takes {_about(self._save_s)}; a failure is expected every {_about(self.mttf_s(now))} "
            f"({self._past.failures} seen)"
        )


def dear(every_steps: int, cost_s: float, step_s: float) -> str | None:
    """The warning for a given number of steps between saves that costs too much; None when it does not."""
    share = cost_s / (every_steps * step_s + cost_s) if step_s else 0.0
    if share <= DEAR:
        return None
    enough = math.ceil(cost_s / step_s / MOST_OVERHEAD)
    return (
        f"train.save_every_steps={every_steps}: a save costs {_about(cost_s)}, so saving takes {100 * share:.0f} % of the "
        f"time; {enough} would take {100 * MOST_OVERHEAD:.0f} %, and null lets the interval be chosen"
    )


def _about(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
