"""Shares of cores: equal, disjoint, near the GPU first."""

import os
import random

import pytest

from hpc.node.cores import allowed_cores, cores_near_gpus, parse_cpulist, share_cores

FAR: frozenset[int] = frozenset()


@pytest.mark.parametrize(
    ("allowed", "near", "shares"),
    [
        (range(8), [FAR] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (range(5), [FAR] * 2, [[0, 1, 2], [3, 4]]),
        # two sockets, GPU 0 near the second one
        (range(8), [frozenset({4, 5, 6, 7}), frozenset({0, 1, 2, 3})], [[4, 5, 6, 7], [0, 1, 2, 3]]),
        # four GPUs, two per socket: each socket is split evenly
        (range(8), [frozenset(range(4))] * 2 + [frozenset(range(4, 8))] * 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # all GPUs on one socket: the others get what is left
        (range(8), [frozenset(range(4))] * 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # a share of the node that does not begin at 0
        ([8, 9, 10, 11], [frozenset({10, 11}), FAR], [[10, 11], [8, 9]]),
        # fewer cores than workers: all of them for everybody
        ([0, 1], [FAR] * 3, [[0, 1]] * 3),
    ],
)
def test_shares_by_hand(allowed: list[int], near: list[frozenset[int]], shares: list[list[int]]) -> None:
    assert share_cores(list(allowed), near) == shares


def test_shares_are_equal_disjoint_and_whole() -> None:
    rng = random.Random(0)
    for _ in range(300):
        allowed = rng.sample(range(256), rng.randint(1, 64))
        workers = rng.randint(1, 8)
        near = [frozenset(rng.sample(range(256), rng.choice([0, 8, 64]))) for _ in range(workers)]
        shares = share_cores(allowed, near)
        assert len(shares) == workers
        if len(allowed) >= workers:
            assert sorted(core for share in shares for core in share) == sorted(allowed)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert all(sorted(share) == sorted(allowed) for share in shares)


def test_the_kernels_list_format() -> None:
    assert parse_cpulist("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpulist("\n") == frozenset()


def test_without_a_driver_nothing_is_known_and_nothing_is_said() -> None:
    notes: list[str] = []
    if not os.path.exists("/proc/driver/nvidia"):
        assert cores_near_gpus(["0", "1"], notes.append) == [FAR, FAR]
    assert cores_near_gpus([], notes.append) == [] and notes == []
    assert sorted(allowed_cores()) == sorted(os.sched_getaffinity(0))
