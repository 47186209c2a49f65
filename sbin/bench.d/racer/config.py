"""How long a step takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    samples: int = 40_000
    step_s: float = 0.25
    """What each rank sleeps in each step."""
