"""Which samples each rank takes in each micro-batch: a pure function of seed, epoch and number of samples.

The order of an epoch is one permutation of all samples. Optimizer step k takes samples k*B to (k+1)*B of it (B: the
global batch), its micro-batches are consecutive parts of these, and the ranks deal a micro-batch out among themselves
like cards. So the order does not depend on the number of ranks, any position in it can be taken up again, and where
all counts divide evenly it is torch's DistributedSampler's. Nothing is repeated or padded: shares of unequal size are
weighted, so that the gradient is what one process with the whole batch would get.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

SampleKey = tuple[int, int]
"""Epoch and index of a sample; the epoch seeds random augmentation."""


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of one micro-batch."""

    keys: list[SampleKey]
    """The samples to load. Never empty: a rank without a share loads one that another rank counts, with weight 0."""
    count: int
    """How many of them are this rank's own: all, or none."""
    step_samples: int
    """Samples of the optimizer step, over all ranks and micro-batches."""
    last: bool
    """Whether the optimizer steps after it."""

    def weight(self, ranks: int) -> float:
        """The factor of this share's mean loss, for gradients that are averaged over the ranks afterwards."""
        return self.count * ranks / self.step_samples


class EpochSampler(Sampler[list[SampleKey]]):
    """A batch sampler over the rest of one epoch, from a position that `set_epoch` sets."""

    def __init__(
        self,
        samples: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.micro_size = -(-batch_size // accumulate)
        self.rank = rank
        self.ranks = ranks
        self.seed = seed
        self.drop_last = drop_last
        self.set_epoch(0)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Go to an epoch, after its first `done` samples."""
        self.epoch = epoch
        self.done = done
        self._order: torch.Tensor | None = None

    def order(self) -> torch.Tensor:
        """The permutation of this epoch: [samples] int64, the same on every rank, as DistributedSampler makes it."""
        if self._order is None:
            generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
            self._order = torch.randperm(self.samples, generator=generator)
        return self._order

    def steps_left(self, done: int | None = None) -> int:
        """The optimizer steps of an epoch after its first `done` samples (None: those of the current position)."""
        left = self.samples - (self.done if done is None else done)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's shares from the current position to the end of the epoch; equally many on every rank."""
        order = self.order()
        for begin, size in self._steps():
            parts = -(-size // self.micro_size)
            for part in range(parts):
                first, last = begin + size * part // parts, begin + size * (part + 1) // parts
                mine = order[first + self.rank : last : self.ranks].tolist()
                loaded = mine or [int(order[first])]
                yield MicroBatch([(self.epoch, i) for i in loaded], len(mine), size, part == parts - 1)

    def smallest_shares(self) -> tuple[int, int]:
        """The fewest samples of a rank in one micro-batch: of a full step, and of the last step of an epoch."""
        sizes = [self.batch_size]
        rest = self.samples % self.batch_size
        sizes.append(self.batch_size if self.drop_last or not rest else rest)
        full, final = (size // -(-size // self.micro_size) // self.ranks for size in sizes)
        return full, final

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for micro_batch in self.micro_batches():
            yield micro_batch.keys

    def __len__(self) -> int:
        return sum(-(-size // self.micro_size) for _, size in self._steps())

    def _steps(self) -> Iterator[tuple[int, int]]:
        for begin in range(self.done, self.samples, self.batch_size):
            size = min(self.batch_size, self.samples - begin)
            if size == self.batch_size or not self.drop_last:
                yield begin, size


class ShareSampler(Sampler[list[SampleKey]]):
    """A batch sampler over this rank's share of the held-out samples: over all ranks, each sample exactly once."""

    def __init__(self, samples: int, *, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.begin = samples * rank // ranks
        self.end = samples * (rank + 1) // ranks
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for first in range(self.begin, self.end, self.batch_size):
            yield [(0, i) for i in range(first, min(first + self.batch_size, self.end))]

    def __len__(self) -> int:
        return -(-(self.end - self.begin) // self.batch_size)
