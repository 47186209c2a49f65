"""torch.distributed.checkpoint's asynchronous save, as its tutorial calls it: a process group, async_save, its future."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def start(folder: Path) -> None:
    """It needs a process group, even for one process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)


def save(state: dict[str, Any], folder: Path) -> "Future[Any]":
    """Returns when training may go on; the future ends when the files are written."""
    return dcp.async_save(state, checkpoint_id=str(folder))
