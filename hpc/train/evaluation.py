"""Evaluation on the held-out samples: each exactly once over all ranks, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpc.schema import TrainConfig
from hpc.train import randomness
from hpc.train.distributed import World
from hpc.train.job import TrainingJob
from hpc.train.loader import begin, make_loader, to_device
from hpc.train.precision import autocast
from hpc.train.sampler import ShareSampler


def evaluate(
    job: TrainingJob,
    model: nn.Module,
    held_out: Dataset[Any],
    config: TrainConfig,
    world: World,
    *,
    batch_size: int,
    workers: int,
    stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Each metric's average over all held-out samples, on every rank; None when `stop` said so between two batches.

    The job's own model is evaluated, not the wrapped one, so that nothing in it can wait for a rank. Every rank asks
    `stop` equally often, though it may have a batch less than others.
    """
    world.broadcast_tensors(model.buffers())  # BatchNorm's statistics differ between ranks until DDP's next step
    samples = len(held_out)  # type: ignore[arg-type]
    shares = ShareSampler(samples, batch_size=batch_size, rank=world.rank, ranks=world.size)
    most = -(-samples // (world.size * batch_size))
    sums: dict[str, Tensor] = {}
    with randomness.set_aside(world.device, config.seed), _evaluating(model), torch.no_grad():
        batches = begin(make_loader(job, held_out, shares, config, world, workers=workers, persistent=False))
        for number in range(most):
            if stop():
                return None
            if number < len(shares):
                with autocast(config, world):
                    results = job.evaluate(model, to_device(next(batches), world.device))
                for name, pair in results.items():
                    exact = [torch.as_tensor(value, dtype=torch.float64, device=world.device) for value in pair]
                    both = torch.stack(exact)  # [sum, count]
                    sums[name] = sums[name] + both if name in sums else both
    return _averages(world.all_gather({name: both.tolist() for name, both in sums.items()}))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards for each module the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _averages(parts: list[dict[str, list[float]]]) -> dict[str, float]:
    """Sum over count for each metric, from the ranks' sums and counts; no samples give NaN."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    averages = {}
    for name in names:
        pairs = [part[name] for part in parts if name in part]
        total, count = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        averages[name] = total / count if count else float("nan")
    return averages
