"""How slow each phase is made, and what goes wrong in the first start. A file `quick` in the run directory ends all slowness."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    samples: int = 236
    held_out: int = 96
    ballast_mib: int = 0
    """A buffer that makes checkpoints larger."""
    begin_s: float = 0.0
    """How long rank 1 takes before it meets the others."""
    data_s: float = 0.0
    """How long rank 1 makes its data."""
    step_s: float = 0.15
    """How long each step takes longer on every rank, from the 10th step on."""
    last_s: float = 0.0
    """The same for the last step."""
    evaluate_s: float = 0.0
    """The same for each batch of an evaluation."""
    save_s: float = 0.0
    """The same for each fsync of a checkpoint's files."""
    trouble: str = ""
    """What happens once in the life of the run: "raise", "memory" or "exit"."""
    trouble_step: int = 0
    trouble_rank: int = 0
