"""What the ranks of an allocation can do: `-m hpc.train.checkup` as the command of the agents, for hpc.doctor.

Each rank multiplies and copies, then the ranks of each node, and all of them, add up: each for a fraction of a second.
Rank 0 prints what every rank measured (hpc/lines.py).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpc.errors import HpcError, report
from hpc.lines import pieces
from hpc.schema import TrainConfig
from hpc.train.distributed import World, connect

REPEATS = 5
PATIENCE_S = 60.0
_SIZES = {"cuda": (4096, 256 << 20, 64 << 20), "cpu": (384, 8 << 20, 1 << 20)}
"""Of each device: rows of the matrices, bytes that are copied, bytes that are added up."""


def main() -> int:
    """Measure; returns the exit code."""
    torch.set_num_threads(1)
    patience = float(os.environ.get("HPC_CHECKUP_PATIENCE_S", PATIENCE_S))
    try:
        with connect(TrainConfig(timeout_s=patience), patience) as world:
            found = measure(world)
            gathered = world.gather(found)
            if gathered is not None:
                sys.stdout.write(pieces("rank-0", {"kind": "ranks", "ranks": gathered}).decode())
                sys.stdout.flush()
    except HpcError as error:
        return report("hpc.train.checkup", error)
    return 0


def measure(world: World) -> dict[str, Any]:
    """This rank's figures; every rank comes here."""
    device = world.device
    rows, copied, added = _SIZES[device.type]
    node = world.info.node_rank
    group = world.group_of(node)
    figures: dict[str, Any] = {
        "rank": world.rank,
        "local_rank": world.info.local_rank,
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "device": device.type,
    }
    figures |= multiply(device, rows)
    figures["copy_gb_s"] = copy(device, copied)
    here, all_ranks = world.info.local_world_size, world.size
    world.barrier()
    figures["node_gb_s"] = add_up(world, added, here, group) if here > 1 else None
    world.barrier()
    figures["all_gb_s"] = add_up(world, added, all_ranks, None) if all_ranks > 1 else None
    return figures


def multiply(device: torch.device, rows: int) -> dict[str, Any]:
    """Speed of a matrix product, the best of a few, and whether the same product was the same each time."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(rows, rows, generator=generator).to(device, kind) for _ in range(2))
    products: list[Tensor] = []
    seconds = _best(lambda: products.append(left @ right), device)
    same = all(torch.equal(products[0], product) for product in products) and bool(products[0].isfinite().all())
    return {"tflop_s": round(2 * rows**3 / seconds / 1e12, 4), "same": same}


def copy(device: torch.device, size: int) -> float:
    """GB/s from host memory to the device (on the CPU, within memory), the best of a few."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return round(size / _best(lambda: target.copy_(source), device) / 1e9, 3)


def add_up(world: World, size: int, ranks: int, group: Any) -> float:
    """GB/s of an all-reduce by the usual measure, 2 (n - 1) / n of the bytes; every rank of the group comes here."""
    tensor = torch.ones(size // 4, device=world.device)
    seconds = _best(lambda: world.total(tensor, group), world.device)
    return round(2 * (ranks - 1) / ranks * size / seconds / 1e9, 3)


def _best(act: Callable[[], object], device: torch.device) -> float:
    """The shortest of some runs, in seconds, after one that warms up."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return max(1e-9, min(times[1:]))


if __name__ == "__main__":
    sys.exit(main())
