"""A worker's heartbeat: a few numbers in memory that it shares with its agent. This is their layout, and how to read it.

The worker writes (hpc.train.heartbeat), the agent reads. The memory is a descriptor that the worker inherits; its number
stands in HPC_HEARTBEAT. Times are time.monotonic's, which all processes of a machine share.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any

VARIABLE = "HPC_HEARTBEAT"
SIZE = 4096
NUMBERS = 4
"""Doubles from the start on: time of the last beat, newest step (-1: none), seconds of a step, limit of the phase (0: none)."""
BEAT, STEP, STEP_S, LIMIT = range(NUMBERS)
NAME = slice(64, 96)
"""The name of the phase, ASCII, filled up with zeros."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a worker has said of itself last."""

    step: int | None
    """Optimizer steps that are done, over the whole run; None before the first one."""
    phase: str
    age_s: float
    """Since the last beat, or the beginning of the phase."""
    step_s: float
    """What a step takes, 0 when nobody knows."""
    limit_s: float | None
    """How long this phase may take without a beat; None: as agreed on for all."""


def read(memory: Any) -> Beat | None:
    """The beat in a shared memory; None when the worker has never written one."""
    beat, step, step_s, limit = struct.unpack_from(f"={NUMBERS}d", memory)
    if beat <= 0.0:
        return None
    name = bytes(memory[NAME]).rstrip(b"\0").decode("ascii", "replace")
    return Beat(
        step=int(step) if step >= 0 else None,
        phase=name,
        age_s=max(0.0, time.monotonic() - beat),
        step_s=max(0.0, step_s),
        limit_s=limit if limit > 0 else None,
    )
