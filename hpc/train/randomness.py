"""The random number generators of a rank: seeded, saved, restored, and set aside."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed torch (CPU and GPU), Python and NumPy; every rank gets streams of its own."""
    mixed = _mix(seed, rank)
    torch.manual_seed(mixed)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed a data-loader process for one sample, so that augmentation depends on neither ranks nor restarts."""
    mixed = _mix(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


def _mix(*numbers: int) -> int:
    """A 63-bit number that differs for neighbouring inputs in every bit (the finaliser of SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def capture(device: torch.device) -> dict[str, Any]:
    """The state of all generators as tensors and plain values, so that it loads without running any code."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [
            str(name),
            torch.from_numpy(keys.astype("int64")),
            int(position),
            int(has_gauss),
            float(cached),
        ]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to a captured state; those that it does not hold are left alone."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = state["numpy"]
        keys = keys.numpy().astype("uint32")
        sys.modules["numpy"].random.set_state((name, keys, position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def set_aside(device: torch.device, seed: int) -> Iterator[None]:
    """Run the block with generators seeded anew, and put them back afterwards as they were."""
    before = capture(device)
    seed_all(seed)
    try:
        yield
    finally:
        restore(before, device)
