"""Which rank the others wait for: the work of its own that each rank does in a step, compared over all nodes.

A rank measures what it does in a step besides waiting for others (hpc/train/work.py) and adds it up in its heartbeat.
The agents tell rank zero's agent now and then; there a rank that needs clearly longer than the others, for a while, is named.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc.node.meeting import Connection
from hpc.node.starting import Worker

LOOKS = 3
"""So often in a row a rank has to be slow to be named, and not to be slow to be no longer."""
TIMES_SLOWER = 1.5
SHARE_OF_A_STEP = 0.1
"""Slow: its own work takes 1.5 times that of the others (their median), and a tenth of a step longer."""
RANKS_RECORDED = 64


@dataclass
class Pace:
    """One rank's work, as it was told last."""

    measured: int = 0
    """Steps so far, and the seconds of its own work in all of them."""
    work_s: float = 0.0
    told: float = 0.0
    own_s: float | None = None
    """A step's own work since the report before; None when no step was made."""
    step_s: float = 0.0
    fresh: bool = False
    slow: int = 0
    """Looks in a row at which it was slow, or, once it is named, was not."""
    named: bool = False


class Paces:
    """The paces of all ranks, on rank zero's agent; on the others only what there is to tell."""

    def __init__(self, slow_after_s: float, say: Callable[[str], None], record: Callable[..., None]) -> None:
        """`slow_after_s`: how long a rank has to be slow to be named."""
        self._every_s = slow_after_s / LOOKS
        self._say, self._record = say, record
        self._paces: dict[int, Pace] = {}
        self._hosts: dict[int, str] = {}
        self._next = time.monotonic() + self._every_s

    def places(self, places: Sequence[tuple[str, int, int]]) -> None:
        """Where the ranks are: host, first rank and number of workers of each task."""
        for host, first, workers in places:
            self._hosts.update(dict.fromkeys(range(first, first + workers), host))

    def exchange(self, workers: Sequence[Worker], host: Connection | None) -> None:
        """When it is time, tell rank zero's agent of these workers; on that one (`host` None) look at those of all."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every_s
        if host is not None:
            host.send(paces=self.of(workers))
        else:
            self.hear(self.of(workers))
            self.look()

    @staticmethod
    def of(workers: Sequence[Worker]) -> list[list[float]]:
        """What an agent tells of its workers: rank, steps, seconds of own work."""
        beats = [(worker.info.rank, worker.pulse.beat()) for worker in workers]
        return [[rank, beat.measured, beat.work_s] for rank, beat in beats if beat is not None and beat.measured]

    def hear(self, reports: Any) -> None:
        """Take in what an agent tells."""
        now = time.monotonic()
        for report in reports if isinstance(reports, list) else ():
            rank, measured, work_s = int(report[0]), int(report[1]), float(report[2])
            pace = self._paces.setdefault(rank, Pace())
            steps = measured - pace.measured
            if steps > 0:
                pace.own_s = (work_s - pace.work_s) / steps
                pace.step_s = (now - pace.told) / steps if pace.told else pace.own_s
                pace.fresh = pace.told > 0  # the first report has the start-up in it
                pace.measured, pace.work_s, pace.told = measured, work_s, now

    def look(self) -> None:
        """Rank zero's agent: name ranks that have become slow, or are so no longer."""
        fresh = {rank: pace for rank, pace in self._paces.items() if pace.fresh and pace.own_s is not None}
        if len(fresh) < 2:
            return
        own = {rank: pace.own_s or 0.0 for rank, pace in fresh.items()}
        step_s = statistics.median(pace.step_s for pace in fresh.values())
        ordered = sorted(own.values())
        for rank, pace in sorted(fresh.items()):
            others_s = median_of_others(ordered, own[rank])
            over = own[rank] > TIMES_SLOWER * others_s and own[rank] - others_s > SHARE_OF_A_STEP * step_s
            pace.slow = pace.slow + 1 if over != pace.named else 0
            pace.fresh = False
            if pace.slow < LOOKS:
                continue
            pace.slow, pace.named = 0, over
            self._tell(rank, own[rank], others_s, step_s, len(own) - 1, slow=over)

    def _tell(self, rank: int, own_s: float, others_s: float, step_s: float, others: int, *, slow: bool) -> None:
        host = self._hosts.get(rank, "?")
        if not slow:
            self._say(f"rank {rank} on {host} is no longer slower than the others")
        else:
            self._say(
                f"rank {rank} on {host} is slow: {own_s:.3g} s of work of its own in a step, the others {others_s:.3g} s "
                f"(median of {others}); they wait for it, a step takes {step_s:.3g} s"
            )
        figures = {"own_s": round(own_s, 6), "others_s": round(others_s, 6), "step_s": round(step_s, 6)}
        self._record("slow" if slow else "slow_no_more", rank=rank, host=host, others=others, **figures)

    def conclude(self) -> None:
        """Record the paces over the whole start, the slowest ranks first, and the median of each host."""
        own = {rank: pace.work_s / pace.measured for rank, pace in self._paces.items() if pace.measured}
        if len(own) < 2:
            return
        by_host: dict[str, list[float]] = {}
        for rank, seconds in own.items():
            by_host.setdefault(self._hosts.get(rank, "?"), []).append(seconds)
        hosts = sorted(((statistics.median(all_s), host) for host, all_s in by_host.items()), reverse=True)
        slowest = sorted(own, key=lambda rank: -own[rank])[:RANKS_RECORDED]
        self._record(
            "paces",
            ranks=len(own),
            median_s=round(statistics.median(own.values()), 6),
            step_s=round(statistics.median(pace.step_s for pace in self._paces.values()), 6),
            slowest=[[rank, self._hosts.get(rank, "?"), round(own[rank], 6)] for rank in slowest],
            hosts=[[host, round(seconds, 6)] for seconds, host in hosts[:RANKS_RECORDED]],
        )


def median_of_others(ordered: Sequence[float], one: float) -> float:
    """The median of sorted numbers without one of them. Thousands of ranks are each compared with all others."""
    place, others = bisect.bisect_left(ordered, one), len(ordered) - 1
    low, high = (ordered[middle + (middle >= place)] for middle in ((others - 1) // 2, others // 2))
    return (low + high) / 2
