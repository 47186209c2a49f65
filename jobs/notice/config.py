"""The parameters of jobs.notice. No torch here: they are checked on the login node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    step_s: float = 0.1
    """How long a step takes at least."""
    steps: int = 4096
    """So many that the time limit comes first."""
