"""What people write by hand on rank 0: torch.save; and, where it has to be durable, fsync and a rename around it."""

import os
from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], file: Path) -> None:
    torch.save(state, file)


def save_durably(state: dict[str, Any], file: Path) -> None:
    beside = file.with_suffix(".tmp")
    torch.save(state, beside)
    for path, flags in ((beside, os.O_RDONLY), (file.parent, os.O_RDONLY | os.O_DIRECTORY)):
        descriptor = os.open(path, flags)
        os.fsync(descriptor)
        os.close(descriptor)
        if path is beside:
            os.replace(beside, file)
