"""The parameters of jobs.digits. No torch here: they are checked on the login node."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OptimConfig:
    lr: float = 0.1
    """The largest learning rate: reached after a tenth of the steps, then falling to nothing."""
    momentum: float = 0.9
    weight_decay: float = 5e-4


@dataclass
class ModelConfig:
    width: int = 16
    """Channels of the first convolution; the second has twice as many."""
    dropout: float = 0.1


@dataclass
class Config:
    optim: OptimConfig = field(default_factory=OptimConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
