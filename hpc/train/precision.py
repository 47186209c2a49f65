"""Mixed precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpc.schema import TrainConfig
from hpc.train.distributed import World


def autocast(config: TrainConfig, world: World) -> AbstractContextManager[Any]:
    """Mixed precision around forward and loss, as configured."""
    if config.precision == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float16
    return torch.autocast(world.device.type, dtype=dtype)
