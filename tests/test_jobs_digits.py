"""The digits: the data is what scikit-learn ships, and the job learns it, however many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_server import Ranks

from hpc.schema import TrainConfig
from hpc.train import metrics
from jobs.digits import job
from jobs.digits.config import Config


def test_images_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = job.load_digits()
    bunch = datasets.load_digits()
    assert torch.equal(images, torch.from_numpy(bunch.images).float().unsqueeze(1) / 16)
    assert torch.equal(labels, torch.from_numpy(bunch.target))


def test_held_out_images_are_never_trained_on() -> None:
    digits = job.Job(Config(), TrainConfig())
    train, held_out = digits.train_data(), digits.eval_data()
    assert (len(train), len(held_out)) == (1437, 360)  # type: ignore[arg-type]
    seen = {tuple(image.flatten().tolist()) for image, _ in train}  # type: ignore[attr-defined]
    assert sum(tuple(image.flatten().tolist()) in seen for image, _ in held_out) == 0  # type: ignore[attr-defined]
    counts = torch.bincount(held_out[:][1])
    assert counts.min() >= 25  # every digit is there


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_reaches_97_percent(ranks: Ranks, tmp_path: Path, number: int) -> None:
    ranks(tmp_path, "jobs.digits", "run_dir=run", ranks=number).check()
    last = metrics.read(tmp_path / "run/metrics.jsonl")[-1]
    assert last["kind"] == "eval" and last["samples"] == 360 and last["accuracy"] >= 0.97


@pytest.mark.slow
def test_learning_rate_can_be_set(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "jobs.digits", "run_dir=run", "optim.lr=0.05", "train.epochs=2").check()
    lines = metrics.read(tmp_path / "run/metrics.jsonl")
    assert 0.045 < max(line["lr"] for line in lines if line["kind"] == "train") <= 0.05
