"""A loss that is no finite number any more: told at once, the good checkpoints stay, and the run ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rank_server import Ranks

from hpc.train.checkpoint import Checkpoints
from hpc.train.divergence import PATIENCE, Diverged, Divergence


def test_one_bad_batch_is_told_and_forgiven() -> None:
    divergence = Divergence(stops=True)
    assert divergence.logged(1, 0.5, 0) is None and not divergence.holds_saves
    told = divergence.logged(2, math.nan, 0)
    assert told == (
        "the loss of step 2 is nan (the last finite one was that of step 1): no checkpoint is written until it is finite again"
    )
    assert divergence.holds_saves and divergence.logged(3, math.inf, 0) is None
    assert divergence.logged(4, 0.4, 0) == "the loss is finite again at step 4" and not divergence.holds_saves
    divergence.give_up(0)


@pytest.mark.parametrize(
    ("saved_at", "words"),
    [(0, "no checkpoint yet"), (20, "step-20, is from before"), (25, "step-25, is later than .* remove it")],
)
def test_it_ends_after_so_many_in_a_row_and_names_the_checkpoint(saved_at: int, words: str) -> None:
    divergence = Divergence(stops=True)
    divergence.logged(20, 0.5, 0)
    for number in range(1, PATIENCE):
        divergence.logged(20 + 10 * number, math.nan, saved_at)
    with pytest.raises(Diverged, match=f"since step 30, for 10 logged steps: .*{words}.*stop_when_diverged=false"):
        divergence.logged(120, math.nan, saved_at)


def test_who_wants_it_so_goes_on() -> None:
    divergence = Divergence(stops=False)
    assert divergence.logged(1, math.nan, 0) == "the loss of step 1 is nan (none was before): training goes on"
    for step in range(2, 50):
        assert divergence.logged(step, math.nan, 0) is None and not divergence.holds_saves
    divergence.give_up(0)


@pytest.mark.slow
def test_a_run_that_diverges_ends_and_goes_on_from_before_with_another_rate(ranks: Ranks, tmp_path: Path) -> None:
    """With a rate of 1e30 the second step's loss is no number: Adam's first step puts weights of 1e30 there."""
    arguments = ("toy", "run_dir=run", "train.batch_size=8", "train.log_every_steps=1", "train.save_every_steps=2")
    arguments += ("optimizer=adamw", "train.keep_checkpoints=1")
    ranks(tmp_path, *arguments, "train.max_steps=2", ranks=2).check()
    trial = ranks(tmp_path, *arguments, "train.epochs=9", "lr=1e30", ranks=2)
    assert trial.codes == [1, 1]
    assert "warning: the loss of step " in trial.logs[0]
    assert "hpc.train: error: the loss is no finite number since step " in trial.logs[0].splitlines()[-1]
    (step,) = Checkpoints(tmp_path / "run/checkpoints").steps()
    again = ranks(tmp_path, *arguments, "train.epochs=2", "train.stop_when_diverged=false", ranks=2).check()
    assert f"resuming at step {step} of 10" in again.logs[0]
