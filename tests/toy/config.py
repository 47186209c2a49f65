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
    """Where each rank notes the ids of the samples it saw, and which files of checkpoints are mapped into its memory."""
    trouble: str = ""
    """"exit" (as soon as no save is under way), "raise", "sleep", "signal", "notice USR2 TERM" (this process signals
    itself, 0.2 s apart), "disk" (a full disk: what calls gets that error), "readonly" (this
    process alone sees the run directory as read-only from then on; needs root), or "group TERM" (as with "notice", to its
    process group, which is its own): what happens in the step `trouble_step` of rank `trouble_rank`."""
    trouble_step: int = 0
    """Counted from 1 in each process: calls of the loss, or of what `trouble_at` says."""
    trouble_rank: int = 0
    """-1: all ranks."""
    trouble_at: str = "loss"
    """"loss", "evaluate", "data" (training data is made) or "sync" (a file of a checkpoint is synced)."""
    slow_after_s: float = 0.0
    """How long each step and evaluation batch takes longer from the moment of the trouble on, on all ranks."""
    slow_elsewhere_s: float = 0.0
    """How long each step takes longer on ranks other than `trouble_rank`."""
    stuck_sample: int = -1
    """A sample that takes ten minutes to load; the process that loads it leaves its id in stuck.pid."""
    slow_sync_s: float = 0.0
    """How long each fsync of a checkpoint takes longer."""
    slow_sync_only: int = 0
    """Of which fsync alone that is true, counted from 1 in each process; 0: of all."""
    only_zero_makes_folders: bool = False
    """On the other ranks, making a folder is an error, and none exists."""
