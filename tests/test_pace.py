"""A slow rank is named: by the work of its own that each does in a step, not by the steps, which all do together."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from steps import ROOT, Step, step_environ

from hpc.login.paces import pace_lines
from hpc.login.status import report_lines
from hpc.node.pace import LOOKS, Paces, median_of_others
from hpc.train.work import OwnWork


@pytest.mark.slow
def test_the_rank_that_the_other_waits_for_is_named(tmp_path: Path) -> None:
    """Rank 1, of another node, needs longer for its loss; the other waits for it in the backward pass, so their steps take equally long."""
    with Step(tmp_path) as step:
        (tmp_path / "run" / "attempt-0").mkdir(parents=True)
        more = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HPC_SECRET": "s" * 32}
        more |= {"HPC_RUN_DIR": str(tmp_path / "run"), "HPC_ATTEMPT": "0"}
        arguments = ["--workers-per-node", "1", "--allow-loopback", "--slow-after", "3", "toy", "samples=160"]
        arguments += ["train.batch_size=8", "slow_elsewhere_s=0.45", "train.loader_workers=0", "train.epochs=1"]
        for task in range(2):
            step.agent({**step_environ(task, tasks_per_node=(1, 1)), **more}, *arguments)
        ended = step.ends()[0]
    assert ended.code == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "is slow" in line]
    assert "rank 1 on " in line and "they wait for it" in line
    events = [json.loads(text) for text in (tmp_path / "run" / "record.jsonl").read_text().splitlines()]
    (slow,) = [event for event in events if event["event"] == "slow"]
    assert slow["rank"] == 1 and slow["own_s"] > 0.45 and slow["others_s"] < slow["own_s"] / 1.5
    (paces,) = [event for event in events if event["event"] == "paces"]
    assert paces["slowest"][0][0] == 1 and paces["ranks"] == 2
    shown = "\n".join(report_lines(tmp_path / "run"))
    assert "rank 1 on " in shown and "was slow from" in shown and "work of its own in a step: median" in shown


class Told:
    """Rank zero's agent's view, told by hand; a look each second of a clock that does not matter."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.paces = Paces(30.0, self.said.append, lambda kind, **fields: self.events.append((kind, fields)))
        self.paces.places([("n1", 0, 2), ("n2", 2, 2)])
        self.steps = 0
        self.work: list[float] = [0.0] * 4

    def look(self, *own_s: float) -> None:
        self.steps += 10
        self.work = [before + 10 * seconds for before, seconds in zip(self.work, own_s, strict=True)]
        self.paces.hear([[rank, self.steps, self.work[rank]] for rank in range(4)])
        self.paces.look()


def test_a_rank_is_named_when_it_stays_slow_and_told_when_it_is_so_no_longer() -> None:
    told = Told()
    for _ in range(1 + 2 * LOOKS):  # the first report has the start-up in it
        told.look(0.1, 0.1, 0.1, 0.105)
    assert told.said == []
    for own_s in [0.4] * (LOOKS - 1) + [0.1] + [0.4] * (LOOKS - 1):  # now and then is not slow
        told.look(0.1, 0.1, 0.1, own_s)
    assert told.said == []
    for _ in range(LOOKS + 3):
        told.look(0.1, 0.1, 0.1, 0.4)
    assert len(told.said) == 1 and "rank 3 on n2 is slow: 0.4 s" in told.said[0] and "median of 3" in told.said[0]
    for _ in range(LOOKS):
        told.look(0.1, 0.1, 0.1, 0.1)
    assert told.said[1:] == ["rank 3 on n2 is no longer slower than the others"]
    told.paces.conclude()
    kinds = [kind for kind, _ in told.events]
    assert kinds == ["slow", "slow_no_more", "paces"]
    assert told.events[-1][1]["slowest"][0][:2] == [3, "n2"] and told.events[-1][1]["hosts"][0][0] == "n2"


def test_the_median_of_the_others_is_that_without_one() -> None:
    chance = random.Random(4)
    for size in range(2, 12):
        numbers = [float(chance.randrange(6)) for _ in range(size)]
        for place, one in enumerate(numbers):
            others = numbers[:place] + numbers[place + 1 :]
            assert median_of_others(sorted(numbers), one) == statistics.median(others)


def test_reports_without_a_step_or_of_one_rank_alone_name_nobody() -> None:
    told = Told()
    for _ in range(5):
        told.paces.hear([[0, 10, 1.0]])
        told.paces.look()
    told.paces.hear("nonsense")
    told.paces.conclude()
    assert told.said == [] and told.events == []


def test_own_work_stands_still_while_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("hpc.train.work.time.monotonic", lambda: now[0])
    work = OwnWork()
    for seconds, act in [(2, work.stop), (50, work.go), (3, work.stop), (7, work.go), (1, work.stop)]:
        now[0] += seconds
        act()
    work.go()
    assert work.taken() == 6.0 and work.taken() == 0.0


def test_a_damaged_record_tells_what_it_can() -> None:
    events: list[dict[str, Any]] = [
        {"event": "slow"},
        {"event": "paces", "slowest": [["x"]], "hosts": 5},
        {"event": "slow", "rank": 1, "time": "never", "own_s": None},
        {"event": "slow_no_more", "rank": 1, "time": 1e300},
    ]
    assert len(pace_lines(events)) == 2
