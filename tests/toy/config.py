"""The switches of the toy job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    samples: int = 40
    held_out: int = 10
    width: int = 8
    dropout: float = 0.0
    batchnorm: bool = False
    noise: float = 0.0
    """Random augmentation: added to each sample by its data set."""
    lr: float = 0.05
    optimizer: str = "sgd"
    ballast_mib: int = 0
    """A buffer that makes checkpoints larger."""
    unused: bool = False
    """A layer that the loss does not use."""
    folder: str = ""
    """Where each rank notes the ids of the samples it saw."""
    trouble: str = ""
    """"exit", "raise", "sleep", "signal" or "argue": what happens in the step `trouble_step` of rank `trouble_rank`."""
    trouble_step: int = 0
    trouble_rank: int = 0
    slow_sync_s: float = 0.0
    """How long each fsync of a checkpoint takes longer."""
    only_zero_makes_folders: bool = False
    """On the other ranks, making a folder is an error, and none exists."""
