"""Ours and its rivals under the same faults: who comes how far.

A fault meets each contestant at the same time of its own clock, once it trains again after the one before; the clocks are
shifted, so that two contestants never start again at the same moment: the cores are for one of them then.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from contestants import Contestant, Floor, Ours, Submitit, Torchrun, trained_together
from diary import LOOK_S
from frame import Bench

RANKS = 2
"""Of each contestant: more than the cores that this machine has would make a start dearer than it is on a real node."""
SAVE_S, STEP_S = 5.0, 0.25
EVERY_S, LEAST_GAP_S = 60.0, 30.0
SHIFT_S = 18.0
SEED = 39
KINDS = ("kill", "notice", "segfault", "requeue")
THROUGH_THE_QUEUE = ("notice", "requeue")


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str


@dataclass
class Result:
    """What became of one contestant in `seconds`. `hits`: kind, seconds until the first step after it, steps lost."""

    seconds: float
    steps: int = 0
    step_s: float = 0.0
    hits: list[tuple[str, float, int]] = field(default_factory=list)

    def lost_s(self, step_s: float) -> float:
        return self.seconds - self.steps * step_s


def trace(seconds: float) -> list[Fault]:
    """Faults every EVERY_S on average, none sooner than LEAST_GAP_S after another; each kind about as often."""
    chance, faults, at_s = random.Random(SEED), list[Fault](), 0.0
    kinds: list[str] = []
    while True:
        at_s += LEAST_GAP_S + chance.expovariate(1 / (EVERY_S - LEAST_GAP_S))
        if at_s > seconds - LEAST_GAP_S:
            return faults
        kinds = kinds or chance.sample(KINDS, len(KINDS))
        faults.append(Fault(at_s, kinds.pop()))


def race(bench: Bench, seconds: float) -> tuple[dict[str, Result], float, float]:
    """The result of each contestant, and medians in seconds of a cold start of ours and of Slurm's wait after a requeue."""
    words = (
        f"step_s={STEP_S}",
        "train.save_every_steps=null",
        f"train.save_every_s={SAVE_S}",
        "train.log_every_steps=4",
    )
    ours = Ours(bench, *words, gpus=RANKS, ranks=RANKS)
    rivals = [rival(bench, RANKS, SAVE_S, STEP_S) for rival in (Torchrun, Submitit)]
    contestants: Sequence[Contestant] = [ours, *rivals]
    floor = Floor(bench)
    try:
        trained_together(contestants)
        with ThreadPoolExecutor(len(contestants)) as pool:
            running = [
                pool.submit(run, one, number * SHIFT_S, seconds, floor if one is ours else None)
                for number, one in enumerate(contestants)
            ]
            found = {one.name: done.result() for one, done in zip(contestants, running, strict=True)}
        return found, statistics.median(ours.cold_starts()), statistics.median(floor.waits())
    finally:
        for one in contestants:
            one.end()
        bench.rig().cancel_jobs()


def run(one: Contestant, shift_s: float, seconds: float, floor: Floor | None) -> Result:
    """Let one contestant suffer the trace, from `shift_s` from now on."""
    time.sleep(shift_s)
    began, hit_at = time.time(), 0.0
    first = one.diary.starts()[-1].last()
    hits: list[tuple[str, float]] = []
    for fault in trace(seconds):
        while time.time() < min(began + seconds, began + fault.at_s) or not _trains(one, hit_at):
            if time.time() > began + seconds:
                break
            _look_after(one)
            time.sleep(LOOK_S)
        else:
            hit_at = time.time()
            one.hurt(fault.kind, one.diary.starts()[-1])
            if floor is not None:
                floor.requeue()
            hits.append((fault.kind, hit_at))
    while time.time() < began + seconds:
        _look_after(one)
        time.sleep(LOOK_S)
    return _result(one, hits, seconds, first, began + seconds)


def _trains(one: Contestant, since: float) -> bool:
    """Since that time a start has begun whose ranks have all finished some steps."""
    start = one.diary.starts()[-1]
    return start.began > since and start.all_began(start.first + 4)


def _look_after(one: Contestant) -> None:
    """What a watchful user's script does: submit again what does not come back by itself."""
    from cluster_rig import FINAL_STATES  # late: the cluster's folder is known once there is a cluster

    if not one.comes_back and time.monotonic() - one.looked > 1.0:
        one.looked = time.monotonic()
        if one.rig.state(one.job_id) in FINAL_STATES:
            one.submit()


def _result(one: Contestant, hits: Sequence[tuple[str, float]], seconds: float, first: int, end: float) -> Result:
    starts = [start for start in one.diary.starts() if start.began < end]
    told = []
    for kind, hit_at in hits:
        before = [start for start in starts if start.began < hit_at][-1]
        after = next((start for start in starts if start.began > hit_at), None)
        again_s = (after.began if after else end) - hit_at
        told.append((kind, again_s, before.last() - after.first + 1 if after else 0))
    gaps = [
        late[0] - early[0]
        for start in starts
        for early, late in zip(start.steps[0], start.steps[0][1:], strict=False)
        if late[0] < end
    ]
    return Result(seconds, starts[-1].last(end) - first, statistics.median(gaps), told)
