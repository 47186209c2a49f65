"""How many steps a run of ours loses by each kind of end; several runs at once, since steps are counted and not timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from contestants import Ours, forget_groups
from diary import Start, until
from frame import Bench

EVERY = 7
"""Steps between two saves: sbin/bench.d/racer/base.yaml."""
STEP_S = 0.25
LIMIT_S = 240.0
NOTICES = ("preemption", "time limit", "requeue by hand", "scancel --signal")
KILLS = ("kill -9", "out of memory", "segfault", "node lost")
Turn = Callable[[Ours, Start], None]


class Losses:
    """Runs that meet the same kind of end again and again."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.rig = bench, bench.rig()
        self.found: dict[str, list[int]] = {}

    def notices(self, times: int) -> dict[str, list[int]]:
        """Steps lost by each kind of notice, so often each."""
        one, two = self.rig.node_names[:2]
        limit_times = -(-times // 2)
        lanes: list[list[tuple[str, int, Sequence[str]]]] = [
            [("preemption", times, [one, "low", "4"]), ("scancel --signal", times, [one, "high", "2"])],
            [("time limit", limit_times, [two, "high", "2"]), ("requeue by hand", times // 2, [two, "high", "2"])],
            [("time limit", times - limit_times, [two, "high", "2"]), ("requeue by hand", times - times // 2, [two, "high", "2"])],
        ]  # fmt: skip
        self._together([lambda lane=lane: [self._one_node(*task) for task in lane] for lane in lanes])
        return self.found

    def kills(self, times: int, nodes_lost: int) -> dict[str, list[int]]:
        """The same for ends without notice."""
        one, two = self.rig.node_names[:2]
        try:
            self._together(
                [
                    lambda: self._one_node("kill -9", times, [one, "high", "2"]),
                    lambda: self._one_node("out of memory", times, [one, "high", "2"]),
                    lambda: self._one_node("segfault", times, [two, "high", "2"]),
                ]
            )
        finally:
            forget_groups()
        self._nodes_lost(nodes_lost)
        return self.found

    def _together(self, lanes: Iterable[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(lane) for lane in lanes]:
                done.result()

    def _one_node(self, kind: str, times: int, where: Sequence[str]) -> None:
        if times == 0:
            return
        node, partition, gpus = where
        words = ["--nodelist", node, "--partition", partition, "launch.workers_per_node=2", f"step_s={STEP_S}"]
        if kind == "time limit":
            words += ["--time", "1", "slurm.signal_lead_s=10", "launch.grace_s=5"]
        run = Ours(self.bench, *words, gpus=int(gpus))
        run.submit()
        try:
            self._turns(run, kind, times)
        finally:
            run.end()

    def _nodes_lost(self, times: int) -> None:
        run = Ours(self.bench, f"step_s={STEP_S}", nodes=2, gpus=1)
        run.submit()
        try:
            self._turns(run, "node lost", times)
        finally:
            run.end()

    def _turns(self, run: Ours, kind: str, times: int) -> None:
        chance = random.Random(kind)
        found = self.found.setdefault(kind, [])
        for number in range(times):
            start = run.trains_on(number, EVERY + chance.randrange(EVERY))
            time.sleep(chance.random() * STEP_S)
            self._end(run, kind, start, number)
            after = run.begun_again(number + 1, LIMIT_S)
            before = run.diary.starts()[number]
            begun = before.last() - (kind in KILLS)  # a step that was not finished is not lost
            found.append(begun - (after.first - 1))

    def _end(self, run: Ours, kind: str, start: Start, number: int) -> None:
        if kind == "preemption":
            node = next(word for word in run.words if word in self.rig.node_names)
            options = ["--partition=high", f"--nodelist={node}", "--gpus-per-node=4", "--mem=1000"]
            self.rig.sbatch(*options, "--output=/dev/null", "--wrap", "sleep 1")
        elif kind == "requeue by hand":
            run.requeue()
        elif kind == "scancel --signal":
            run.notice()
        elif kind == "kill -9":
            run.hurt("kill", start)
        elif kind == "node lost":
            self._lose_node(run, number)
        elif kind in KILLS:
            run.accident("memory" if kind == "out of memory" else "segfault", start)

    def _lose_node(self, run: Ours, number: int) -> None:
        job = self.rig.job(run.job_id)
        node = self.rig.slurm("scontrol", "show", "hostnames", job["NodeList"]).split()[(number + 1) % 2]
        restarts = int(job["Restarts"])
        try:
            self.rig.devcluster("kill", node)
            until(lambda: int(self.rig.job(run.job_id)["Restarts"]) > restarts, LIMIT_S, f"the requeue without {node}")
        finally:
            self.rig.devcluster("heal", node)
