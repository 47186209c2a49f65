"""Exact resume: stopped anywhere, the run is bit for bit the uninterrupted one; what has changed is named."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rank_server import Ranks
from test_train_loop import EVERY_STEP, RUN, equal, final_states, lines, losses, made

from hpc.train import checkpoint
from hpc.train.checkpoint import Checkpoints
from hpc.train.origin import differences, other_settings
from hpc.train.sampler import EpochSampler

# 53 samples in batches of 8: 7 steps per epoch, the last one of 5 samples; the warm-up is 4 steps long
RANDOM = ("toy", RUN, EVERY_STEP, "samples=53", "train.batch_size=8", "train.epochs=3", "dropout=0.3", "noise=0.3")
RANDOM += ("optimizer=adamw", "batchnorm=true", "train.drop_last=true", "held_out=9")
STOP = ("trouble=notice TERM", "trouble_rank=-1", "slow_after_s=0.1")


def exact(one: Path, other: Path) -> None:
    """Losses, learning rates, evaluations, sample ids and all final state."""
    assert losses(one) == losses(other)
    assert [line["lr"] for line in lines(one)] == [line["lr"] for line in lines(other)]
    assert lines(one, "eval") == lines(other, "eval")
    for before, after in zip(final_states(one), final_states(other), strict=True):
        assert equal(before, after)


def ids(folder: Path, rank: int) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "more", "stops"),
    [
        (1, (), (1, 2)),  # in the warm-up, after one step and again after the next
        (2, ("train.accumulate=3", "batchnorm=false"), (4, 8)),  # each in the first micro-batch of a step
        (2, ("train.loader_workers=2",), (6, 12)),  # the last step of an epoch, and the same of the next one
        (4, ("train.loader_workers=1", "train.clip_grad_norm=0.1"), (9,)),
    ],
)
def test_k10_stopped_at_any_step_it_is_the_uninterrupted_run(
    ranks: Ranks, tmp_path: Path, number: int, more: tuple[str, ...], stops: Iterable[int]
) -> None:
    straight, broken = made(tmp_path, "straight"), made(tmp_path, "broken")
    ranks(straight, *RANDOM, *more, "folder=.", ranks=number).check()
    parts = 3 if "train.accumulate=3" in more else 1
    at = 0
    for step in stops:
        calls = (step - at - 1) * parts + 1
        trial = ranks(broken, *RANDOM, *more, "folder=.", *STOP, f"trouble_step={calls}", ranks=number)
        assert trial.codes == [75] * number, trial.text()
        at = Checkpoints(broken / "run/checkpoints").steps()[-1]
        assert at >= step
    ranks(broken, *RANDOM, *more, "folder=.", ranks=number).check()
    exact(straight, broken)
    for rank in range(number):
        assert ids(straight, rank) == ids(broken, rank)
        assert (broken / f"mapped-{rank}").read_text() == "", "a checkpoint may be removed while a rank trains"


@pytest.mark.slow
def test_k07_k09_killed_at_the_edge_of_an_epoch_with_random_loader_workers(ranks: Ranks, tmp_path: Path) -> None:
    straight, broken = made(tmp_path, "straight"), made(tmp_path, "broken")
    more = ("train.loader_workers=2", "train.save_every_steps=6")
    ranks(straight, *RANDOM, *more).check()
    assert ranks(broken, *RANDOM, *more, "trouble=exit", "trouble_step=9").codes == [41]
    assert Checkpoints(broken / "run/checkpoints").steps() == [6]
    again = ranks(broken, *RANDOM, *more, "trouble=exit", "trouble_step=9")
    assert again.codes == [41] and "resuming at step 6 of 18" in again.logs[0]
    ranks(broken, *RANDOM, *more).check()
    exact(straight, broken)


@pytest.mark.slow
def test_k15_another_number_of_ranks_goes_on_in_the_same_order(ranks: Ranks, tmp_path: Path) -> None:
    """3 ranks, then 2, then 1: the steps' samples are those of the epoch's one order, each once."""
    arguments = ("toy", RUN, "samples=44", "train.batch_size=6", "train.epochs=1", "train.accumulate=2", "folder=.")
    order = EpochSampler(44, batch_size=6).order().tolist()
    steps: list[set[int]] = []
    for number, last in ((3, 3), (2, 5), (1, 8)):
        folder = tmp_path / "run/checkpoints"
        end = ("train.max_steps=8",) if last == 8 else (f"train.max_steps={last}",)
        ranks(tmp_path, *arguments, *end, ranks=number).check()
        assert Checkpoints(folder).steps()[-1] == last
        micro = [[set(part) for part in ids(tmp_path, rank)] for rank in range(number)]
        for rank in range(number):
            (tmp_path / f"ids-{rank}.jsonl").unlink()
        # two micro-batches a step, but one in the last step, of two samples
        parts = [set().union(*shares) for shares in zip(*micro, strict=True)]
        steps += [set().union(*parts[at : at + 2]) for at in range(0, len(parts), 2)]
    assert steps == [set(order[at : at + 6]) for at in range(0, 44, 6)]


@pytest.mark.slow
def test_what_has_changed_since_the_checkpoint_is_named(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(tmp_path, *RANDOM, "train.max_steps=2").check()
    assert "changed since" not in first.logs[0]
    step = tmp_path / "run/checkpoints/step-2"
    assert "max_steps: 2" in (step / "config.yaml").read_text()
    trainer = checkpoint.read(step)[1]
    assert "toy/job.py" in trainer["made_with"]["code"] and "hpc/train/loop.py" in trainer["made_with"]["code"]
    again = ranks(tmp_path, *RANDOM, "train.max_steps=3", "lr=0.04", "slurm.nodes=4").check()
    told = [line for line in again.logs[0].splitlines() if line.startswith("changed since the checkpoint: ")]
    assert sorted(told) == [
        "changed since the checkpoint: lr: 0.05 -> 0.04",
        "changed since the checkpoint: train.max_steps: 2 -> 3",
    ]
    # and they hold: the third step has the new rate, at the place in the schedule (of two steps) that was reached
    assert [line["lr"] for line in lines(tmp_path)] == pytest.approx([0.05 / 4, 0.05 * 2 / 4 * 3 / 4, 0.04 * 3 / 4 / 2])


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_steps_and_another_precision(ranks: Ranks, tmp_path: Path) -> None:
    """The schedule of jobs.digits depends on the number of steps: it goes on as if it had been the new one all along."""
    straight, changed = made(tmp_path, "straight"), made(tmp_path, "changed")
    digits = ("jobs.digits", RUN, EVERY_STEP, "train.batch_size=256")  # 6 steps per epoch
    ranks(straight, *digits, "train.epochs=3").check()
    ranks(changed, *digits, "train.epochs=1").check()
    ranks(changed, *digits, "train.epochs=2", "train.max_steps=8", "train.precision=fp16").check()
    again = ranks(changed, *digits, "train.epochs=3").check()
    assert "resuming at step 8 of 18" in again.logs[0]
    rates, expected = ([(line["step"], line["lr"]) for line in lines(folder)] for folder in (changed, straight))
    # the first step after a change has the rate that the schedule before it had come to
    assert [step for step, _ in rates] == list(range(1, 19)) and rates[9:] == expected[9:] and rates[:6] != expected[:6]


def test_code_that_has_changed_is_named() -> None:
    then: dict[str, Any] = {"versions": {"torch": "2.12.0"}, "code": {"jobs/a/job.py": "1", "jobs/a/old.py": "2"}}
    now = {"versions": {"torch": "2.13.0"}, "code": {"jobs/a/job.py": "3", "jobs/a/new.py": "2"}}
    assert differences(then, now) == [
        "torch: 2.12.0 -> 2.13.0",
        "code: jobs/a/job.py has changed",
        "code: jobs/a/new.py is new",
        "code: jobs/a/old.py is gone",
    ]
    assert differences({}, now) == [] and differences(now, now) == []
    assert other_settings("a: {b: 1, c: [1, 2]}\nslurm: {nodes: 1}\n", "a: {b: 2, c: [1]}\nd: x\n") == [
        "a.b: 1 -> 2",
        "a.c: [1, 2] -> [1]",
        "d: not there -> x",
    ]
    assert other_settings("", "a: 1\n") == []
