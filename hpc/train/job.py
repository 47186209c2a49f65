"""What a training job gives: model, data, optimizer and loss. The loop is written once, in hpc/train/loop.py.

jobs/<name>/job.py defines `class Job(TrainingJob)`, and jobs/<name>/config.py a dataclass `Config` with its
parameters, without torch, so that the login node can check them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hpc.schema import TrainConfig


class TrainingJob(abc.ABC):
    """What a folder in jobs/ gives. Every rank makes its own instance, with the same values."""

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples; None takes torch's default."""

    def __init__(self, parameters: Any, train: TrainConfig) -> None:
        self.parameters = parameters
        """The instance of the job's own `Config`."""
        self.train = train

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The model, freshly initialised, on the CPU; the seed is set before, and is the same on every rank."""

    @abc.abstractmethod
    def train_data(self) -> Dataset[Any]:
        """The training samples: map-style, with `len()`, in the same order on every rank."""

    def eval_data(self) -> Dataset[Any] | None:
        """The held-out samples, of the same form; None means that nothing is evaluated."""
        return None

    @abc.abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the parameters of `model`, which is on its device already and not wrapped by DDP."""

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """The learning-rate schedule, stepped once per optimizer step; None leaves the rate as it is."""
        return None

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over the samples of `batch`: a scalar. The batch is on the device already.

        Call `model` (which may be wrapped by DDP) once, and nothing inside it, so that gradients are averaged.
        """

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """For each metric its sum and its count over this batch: {"accuracy": (hits, labels)}.

        The loop reports sum over count of all held-out samples, each counted once, whatever the number of ranks.
        `model` is in evaluation mode, not wrapped by DDP, and no gradient is kept. By default the mean loss.
        """
        count = self.samples(batch)
        return {"loss": (self.loss(model, batch).detach() * count, count)}

    def samples(self, batch: Any) -> int:
        """How many samples a batch holds: the first dimension of its first tensor.

        Raises:
            TypeError: there is no tensor in it with a first dimension; the job must override this method.
        """
        for tensor in _tensors(batch):
            if tensor.dim() > 0:
                return int(tensor.shape[0])
        raise TypeError(
            f"a batch of type {type(batch).__name__} holds no tensor with a first dimension: "
            f"override samples(batch) in {type(self).__module__}.{type(self).__qualname__}"
        )


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        for value in batch:
            yield from _tensors(value)
