"""DDP, SyncBatchNorm and DataParallel: what is refused, and with which advice."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from rank_server import Ranks
from torch import nn

from hpc.errors import ConfigError
from hpc.ranks import SINGLE_PROCESS
from hpc.schema import TrainConfig
from hpc.train import strategy
from hpc.train.distributed import World
from hpc.train.sampler import EpochSampler

ALONE = World(SINGLE_PROCESS, torch.device("cpu"), 10)


@pytest.mark.slow
def test_d13_unused_parameters_are_named_with_the_switch(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, "toy", "unused=true", "train.batch_size=8", ranks=2)
    assert trial.codes == [2, 2], trial.text()
    last = trial.logs[0].splitlines()[-1]
    assert "forgotten.weight, forgotten.bias" in last and "train.find_unused_parameters=true" in last
    ranks(tmp_path, "toy", "unused=true", "train.find_unused_parameters=true", "train.batch_size=8", ranks=2).check()
    ranks(tmp_path, "toy", "unused=true", "train.batch_size=8").check()  # alone, it does no harm


@pytest.mark.slow
def test_d10_a_batch_too_small_for_batchnorm_is_refused_at_the_start(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", "batchnorm=true", "samples=9", "train.batch_size=4")
    trial = ranks(tmp_path, *arguments, ranks=2)
    assert trial.codes == [2, 2]
    last = trial.logs[0].splitlines()[-1]
    assert "norm (BatchNorm1d) needs two samples" in last and "train.drop_last=true" in last
    assert "step 1/" not in trial.logs[0]
    ranks(tmp_path, *arguments, "train.drop_last=true", ranks=2).check()
    trial = ranks(tmp_path, *arguments, "train.batch_size=2", ranks=2)
    assert trial.codes == [2, 2] and "raise train.batch_size" in trial.logs[0].splitlines()[-1]


@pytest.mark.slow
def test_d11_no_sync_batchnorm_on_the_cpu_but_a_note(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, "toy", "batchnorm=true", "train.sync_batchnorm=true").check()
    assert "BatchNorm stays as it is on the CPU" in trial.logs[0]


def test_d11_conversion_needs_several_gpus(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy.log, "propagate", True)
    caplog.set_level(logging.INFO, "hpc.train")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert isinstance(strategy.place(model, TrainConfig(), ALONE)[1], nn.BatchNorm1d)  # type: ignore[index]
    assert "BatchNorm stays as it is" in caplog.text
    caplog.clear()
    strategy.place(nn.Linear(2, 2), TrainConfig(), ALONE)
    strategy.place(model, TrainConfig(sync_batchnorm=False), ALONE)
    assert caplog.text == ""


def test_several_gpus_get_sync_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "size", 2)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)
    world = World(SINGLE_PROCESS, torch.device("cuda", 0), 10)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert isinstance(strategy.place(model, TrainConfig(), world)[1], nn.SyncBatchNorm)  # type: ignore[index]


def test_lonely_samples_matter_to_batchnorm_alone() -> None:
    sampler = EpochSampler(9, batch_size=4, ranks=2)
    strategy.refuse_lonely_samples(nn.Linear(2, 2), sampler)
    strategy.refuse_lonely_samples(nn.BatchNorm2d(2), sampler)  # pixels make up for samples
    with pytest.raises(ConfigError, match="last batch of an epoch a rank gets 0"):
        strategy.refuse_lonely_samples(nn.Sequential(nn.BatchNorm1d(2)), sampler)


def test_data_parallel_without_gpus_is_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    assert strategy.wrap(model, TrainConfig(strategy="dp"), ALONE) is model


class Replicated(nn.DataParallel):
    """DataParallel as it is on three GPUs, for its type and count alone."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.device_ids = [0, 1, 2]


def test_data_parallel_losses_are_weighted_by_their_parts() -> None:
    # ten samples on three replicas are parts of 4, 4 and 2, as torch scatters them
    values = torch.arange(10.0)
    parts = torch.stack([part.mean() for part in values.chunk(3)])
    assert strategy.scalar(parts, Replicated(), 10) == values.mean()
    assert strategy.scalar(values.mean(), Replicated(), 10) == values.mean()
    with pytest.raises(ValueError, match=r"shape \[10\]; a scalar"):
        strategy.scalar(values, nn.Linear(1, 1), 10)
