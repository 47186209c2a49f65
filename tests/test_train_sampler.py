"""Which samples each rank takes: each once per epoch, in an order that does not depend on the ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from hpc.train.sampler import EpochSampler, MicroBatch, ShareSampler

shapes = st.tuples(
    st.integers(1, 200),  # samples
    st.integers(1, 5),  # ranks
    st.integers(1, 4),  # accumulate
    st.integers(1, 6),  # samples of each rank in a micro-batch
    st.integers(0, 3),  # a remainder, so that shares are uneven
)


def samplers(samples: int, ranks: int, accumulate: int, batch_size: int, **more: object) -> list[EpochSampler]:
    return [
        EpochSampler(samples, batch_size=batch_size, accumulate=accumulate, rank=rank, ranks=ranks, **more)
        for rank in range(ranks)
    ]


def own(micro: MicroBatch) -> list[int]:
    return [index for _, index in micro.keys][: micro.count]


def steps(sampler: EpochSampler) -> list[list[MicroBatch]]:
    """The micro-batches of each optimizer step."""
    found: list[list[MicroBatch]] = [[]]
    for micro in sampler.micro_batches():
        found[-1].append(micro)
        if micro.last:
            found.append([])
    assert found.pop() == []
    return found


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_each_sample_once_and_weights_as_one_process(shape: tuple[int, int, int, int, int]) -> None:
    samples, ranks, accumulate, each, rest = shape
    batch_size = ranks * accumulate * each + rest
    by_rank = [steps(sampler) for sampler in samplers(samples, ranks, accumulate, batch_size)]
    assert Counter(i for own_steps in by_rank for s in own_steps for m in s for i in own(m)) == Counter(range(samples))
    for parts in zip(*by_rank, strict=True):  # the ranks agree on the number of steps ...
        sizes = {len(part) for part in parts}
        assert len(sizes) == 1 and sizes.pop() <= accumulate  # ... and of micro-batches,
        step_samples = parts[0][0].step_samples
        micro = [m for part in parts for m in part]
        assert sum(m.count for m in micro) == step_samples == len({i for m in micro for i in own(m)})
        assert sum(m.weight(ranks) / ranks for m in micro) == pytest.approx(1)  # the mean over the global batch,
        assert all(m.keys for m in micro)  # and everybody has something to load
        for together in zip(*parts, strict=True):
            counts = [m.count for m in together]
            assert max(counts) - min(counts) <= 1 and counts[0] > 0
    for own_steps, sampler in zip(by_rank, samplers(samples, ranks, accumulate, batch_size), strict=True):
        assert len(sampler) == sum(map(len, own_steps)) == len(list(sampler))
        assert sampler.steps_left() == len(own_steps)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_global_batches_do_not_depend_on_ranks_or_accumulation(ranks: int, accumulate: int) -> None:
    batches: list[set[int]] = [set() for _ in range(5)]
    for sampler in samplers(103, ranks, accumulate, 24, seed=5):
        for batch, step in zip(batches, steps(sampler), strict=True):
            batch |= {i for m in step for i in own(m)}
    order = EpochSampler(103, batch_size=24, seed=5).order().tolist()
    assert batches == [set(order[k : k + 24]) for k in range(0, 103, 24)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("epoch", [0, 3])
def test_is_torchs_distributed_sampler_where_counts_divide(ranks: int, epoch: int) -> None:
    each = 4
    for sampler in samplers(96, ranks, 2, each * ranks * 2, seed=11):
        sampler.set_epoch(epoch)
        theirs = DistributedSampler(range(96), num_replicas=ranks, rank=sampler.rank, seed=11)  # type: ignore[arg-type]
        theirs.set_epoch(epoch)
        assert [i for m in sampler.micro_batches() for i in own(m)] == list(theirs)


def test_d04_another_order_in_every_epoch_and_the_same_in_every_run() -> None:
    orders = []
    for _ in range(2):
        sampler = EpochSampler(50, batch_size=10, seed=3)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.append([key for keys in sampler for key in keys])
    assert orders[:3] == orders[3:]
    indices = [[index for _, index in order] for order in orders[:3]]
    assert indices[0] != indices[1] != indices[2] != indices[0]
    assert [{epoch for epoch, _ in order} for order in orders[:3]] == [{0}, {1}, {2}]


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 20))
def test_any_position_can_be_taken_up_again_by_any_number_of_ranks(
    shape: tuple[int, int, int, int, int], done_steps: int
) -> None:
    samples, ranks, accumulate, each, rest = shape
    batch_size = ranks * accumulate * each + rest
    whole = EpochSampler(samples, batch_size=batch_size)
    done = min(samples, done_steps * batch_size)
    rest_of_order = whole.order().tolist()[done:]
    taken: Counter[int] = Counter()
    for sampler in samplers(samples, ranks, accumulate, batch_size):
        sampler.set_epoch(0, done)
        assert sampler.steps_left() == whole.steps_left(done)
        taken.update(i for m in sampler.micro_batches() for i in own(m))
    assert taken == Counter(rest_of_order)


def test_d06_a_partial_step_is_a_step_of_its_own() -> None:
    sampler = EpochSampler(10, batch_size=8, accumulate=4)  # five micro-batches of two
    first, second = steps(sampler)
    assert [m.count for m in first] == [2, 2, 2, 2] and [m.weight(1) for m in first] == [0.25] * 4
    assert [m.count for m in second] == [2] and second[0].weight(1) == 1


def test_drop_last_leaves_out_what_fills_no_batch() -> None:
    sampler = EpochSampler(10, batch_size=4, drop_last=True)
    assert [m.step_samples for m in sampler.micro_batches()] == [4, 4]
    assert sampler.steps_left() == 2 == len(sampler)
    assert sampler.steps_left(8) == 0


@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulate", "ranks", "drop_last", "expected"),
    [
        (9, 4, 1, 2, False, (2, 0)),
        (9, 4, 1, 2, True, (2, 2)),
        (8, 4, 2, 2, False, (1, 1)),
        (12, 8, 1, 2, False, (4, 2)),
    ],
)
def test_smallest_shares(
    samples: int, batch_size: int, accumulate: int, ranks: int, drop_last: bool, expected: tuple[int, int]
) -> None:
    sampler = EpochSampler(samples, batch_size=batch_size, accumulate=accumulate, ranks=ranks, drop_last=drop_last)
    assert sampler.smallest_shares() == expected


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 100), st.integers(1, 7), st.integers(1, 9))
def test_d01_held_out_samples_once_each(samples: int, ranks: int, batch_size: int) -> None:
    taken: list[int] = []
    for rank in range(ranks):
        shares = ShareSampler(samples, batch_size=batch_size, rank=rank, ranks=ranks)
        batches = list(shares)
        assert len(shares) == len(batches) and all(0 < len(batch) <= batch_size for batch in batches)
        taken += [index for batch in batches for _, index in batch]
    assert taken == list(range(samples))


def test_order_is_torchs_permutation_of_seed_plus_epoch() -> None:
    sampler = EpochSampler(20, batch_size=5, seed=7)
    sampler.set_epoch(2)
    assert torch.equal(sampler.order(), torch.randperm(20, generator=torch.Generator().manual_seed(9)))
