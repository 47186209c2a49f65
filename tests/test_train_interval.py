"""The interval between saves: from the cost of one and the failures seen; and that all ranks save at the same step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from test_train_loop import RUN

from hpc.config import load
from hpc.errors import ConfigError
from hpc.train.checkpoint import Checkpoints
from hpc.train.interval import FIRST_S, History, Pace, Plan, dear, first_s, history, interval_s, mttf_s

DAY = 86400.0


def test_the_interval_is_youngs_and_never_costs_more_than_two_percent() -> None:
    assert interval_s(0.5, 10000.0) == 100.0
    assert interval_s(0.5, 100.0) == 25.0  # Young's would be 10 s
    assert interval_s(0.01, 1.0, save_s=20.0) == 20.0
    for cost in (0.01, 1.0, 60.0):
        for mttf in (30.0, 1e4, 1e7):
            best = interval_s(cost, mttf)
            assert cost / best <= 0.02 + 1e-9
            for other in (0.7 * best, 1.4 * best):
                assert best == cost / 0.02 or cost / best + best / 2 / mttf < cost / other + other / 2 / mttf


def test_the_known_rate_of_failures_gives_way_to_what_is_seen() -> None:
    known = DAY / 6.5e-3
    assert mttf_s(1, 0, 0) == known and mttf_s(4, 0, 0) == known / 4
    assert known < mttf_s(1, 30 * DAY, 0) < known + 31 * DAY
    assert mttf_s(2, 4 * 60, 4) == pytest.approx(60, rel=4)
    assert mttf_s(2, 8 * 60, 8) == pytest.approx(60, rel=0.05)
    assert mttf_s(2, DAY, 20) == pytest.approx(DAY / 20, rel=0.01)


def events(*pairs: tuple[float, str], **more: Any) -> list[dict[str, Any]]:
    return [{"time": time, "event": event, **more} for time, event in pairs]


def test_what_a_record_tells() -> None:
    assert history([]) == History()
    record = events((0, "started"), (10, "resumed"), (11, "first_step"), (70, "ended"), (75, "resumed"))
    record += [{"time": 80.0, "event": "saved", "stall_s": 0.05, "seconds": 0.5}]
    record += events((95, "stopping"), (96, "ended"), (200, "resumed"), (230, "first_step"), (400, "resumed"))
    assert history(record) == History(60 + 21 + 30, 3, pytest.approx(0.1), 0.5)
    record += events((450, "ended"), code=0)
    assert history(record) == History(60 + 21 + 30 + 50, 2, pytest.approx(0.1), 0.5)
    assert first_s(History()) == FIRST_S and first_s(History(20, 2)) == 1.0 and first_s(History(2000, 1)) == FIRST_S


def test_a_plan_from_the_first_save_to_the_chosen_interval() -> None:
    plan = Plan(0.0, History(), nodes=1)
    assert plan.next_step(5, 1.0, 0.0) == 0 and plan.news(1.0, 0.1) is None
    assert plan.next_step(5, 1.0, 0.5) == 5 + math.ceil((FIRST_S - 1) / 0.5)
    assert plan.next_step(70, FIRST_S + 0.1, 0.5) == 70
    plan.save_begins(31.0)
    plan.measured(0.02, 0.3)
    chosen = interval_s(0.02, mttf_s(1, 40.0, 0), 0.3)
    assert plan.next_step(80, 40.0, 0.5) == 80 + math.ceil((31 + chosen - 40) / 0.5)
    told = plan.news(40.0, 0.5)
    assert (
        told is not None and told.startswith(f"saving every {round(chosen / 0.5)} steps (about ") and "0 seen" in told
    )
    assert plan.news(50.0, 0.5) is None
    for _ in range(5):
        plan.measured(0.2, 0.3)
    assert plan.news(60.0, 0.5) is not None
    known = Plan(0.0, History(600, 10, 0.1, 0.5), nodes=2)
    assert known.next_step(0, 1.0, 0.1) == pytest.approx(40, abs=2)  # 5 s, of which one is over


@pytest.mark.parametrize(("given", "expected"), [(0.0, math.inf), (math.inf, math.inf), (7.0, 7.0)])
def test_a_given_time_is_kept(given: float, expected: float) -> None:
    plan = Plan(0.0, History(), 1, given)
    plan.measured(1.0, 1.0)
    assert plan.interval_s(3.0) == expected and plan.news(3.0, 0.1) is None


def test_pace_tells_what_a_save_slows() -> None:
    pace, now = Pace(0.0), 0.0
    for _ in range(50):
        now += 0.1
        pace.step(now, False)
    assert pace.step_s == pytest.approx(0.1) and pace.slowed_s() == 0
    pace.save_begins()
    now += 3.0
    pace.restart(now)  # the copy
    for saving in (True, True, False):
        now += 0.15
        pace.step(now, saving)
    now += 0.1
    pace.step(now, False)
    assert pace.slowed_s() == pytest.approx(0.15) and pace.step_s == pytest.approx(0.1)


def test_a_given_number_of_steps_that_costs_too_much_is_warned_of() -> None:
    assert dear(100, 0.4, 0.1) is None
    warning = dear(10, 0.5, 0.1)
    assert warning is not None and "33 % of the time; 250 would take 2 %" in warning


def test_both_a_time_and_a_number_of_steps_are_refused(nobody_elses_settings: None) -> None:
    with pytest.raises(ConfigError, match=r"train\.save_every_s"):
        load(overrides=["train.save_every_steps=5", "train.save_every_s=5"])
    assert load(overrides=["train.save_every_s=0"]).config.train.save_every_s == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_all_ranks_save_at_the_same_steps_by_time(ranks: Ranks, tmp_path: Path, number: int) -> None:
    arguments = ("toy", RUN, "samples=60", "train.batch_size=6", "train.epochs=4", "train.log_every_steps=3")
    arguments += ("train.save_every_s=0.2", "train.keep_checkpoints=100", "slow_after_s=0.05", "held_out=0")
    environ = {"HPC_RUN_DIR": str(tmp_path / "run"), "HPC_ATTEMPT": "4", "HPC_RESTART": "2"}
    ranks(tmp_path, *arguments, ranks=number, env=environ).check()
    steps = Checkpoints(tmp_path / "run/checkpoints").steps()
    assert len(steps) > 3 and steps[-1] == 40
    record = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()]
    assert all(event["attempt"] == 4 and event["restart"] == 2 for event in record)
    assert [event["event"] for event in record] == ["resumed", "first_step"] + ["saved"] * len(steps)
    assert record[0]["step"] == 0 and record[0]["checkpoint"] is None and record[1]["step"] == 1
    for step, event in zip(steps, record[2:], strict=True):
        assert event["step"] == step and event["checkpoint"] == f"step-{step}"
        assert 0 <= event["stall_s"] <= event["seconds"] and event["bytes"] > 1000
    ranks(tmp_path, *arguments, "train.epochs=5", ranks=number, env=environ).check()
    again = [json.loads(line) for line in (tmp_path / "run/record.jsonl").read_text().splitlines()][len(record) :]
    assert again[0]["event"] == "resumed" and (again[0]["step"], again[0]["checkpoint"]) == (40, "step-40")
    assert (again[1]["event"], again[1]["step"]) == ("first_step", 41)


@pytest.mark.slow
def test_the_first_interval_is_told_and_a_stop_is_in_the_record(ranks: Ranks, tmp_path: Path) -> None:
    record = tmp_path / "run/record.jsonl"
    record.parent.mkdir(mode=0o700)
    lines = [{"time": 1.0, "event": "resumed"}, {"time": 2.0, "event": "saved", "stall_s": 0.01, "seconds": 0.02}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("toy", RUN, "samples=60", "train.batch_size=6", "train.epochs=40", "train.log_every_steps=1")
    trouble = ("trouble=notice TERM", "trouble_step=8", "slow_after_s=0.1")
    trial = ranks(tmp_path, *arguments, *trouble, env={"HPC_RUN_DIR": str(tmp_path / "run")})
    assert trial.codes == [75] and "saving every " in trial.logs[0], trial.text()
    events = [json.loads(line) for line in record.read_text().splitlines()]
    assert [event["event"] for event in events[-2:]] == ["stopping", "saved"]
    assert events[-2]["reason"] == "SIGTERM" and events[-2]["step"] == events[-1]["step"]


@pytest.mark.slow
def test_a_record_that_cannot_be_written_does_not_stop_the_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run/record.jsonl").mkdir(parents=True, mode=0o700)
    (tmp_path / "run").chmod(0o700)
    trial = ranks(tmp_path, "toy", RUN, env={"HPC_RUN_DIR": str(tmp_path / "run")}).check()
    assert trial.logs[0].count("cannot be written, going on without it") == 1
