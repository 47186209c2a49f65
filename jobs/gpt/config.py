"""The parameters of jobs.gpt. No torch here: the login node checks them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc.errors import ConfigError


@dataclass
class ModelConfig:
    """The size of the model; about 12 * layers * width**2 parameters."""

    layers: int = 3
    width: int = 128
    """Channels of the residual stream; a multiple of 2 * heads."""
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            _at_least_one(f"model.{name}", getattr(self, name))
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width={self.width} with model.heads={self.heads}: a head needs an even number of channels; "
                f"make model.width a multiple of {2 * self.heads}"
            )
        _fraction("model.dropout", self.dropout)


@dataclass
class DataConfig:
    """Which text, and how it is cut into samples."""

    context: int = 128
    """Bytes of one sample."""
    folder: str | None = None
    """Train on the files of this folder; null takes the standard library of the Python that runs."""
    suffix: str = ".py"
    """Only files whose names end like this."""
    held_out: float = 0.05
    """Share of the files that are held out, chosen by a hash of their path."""
    max_bytes: int | None = None
    """Read no more training text than this, in bytes; a sample of the files is taken, so that few are opened."""
    max_eval_bytes: int | None = None
    """The same for the held-out text."""

    def __post_init__(self) -> None:
        _at_least_one("data.context", self.context)
        for name in ("max_bytes", "max_eval_bytes"):
            if getattr(self, name) is not None:
                _at_least_one(f"data.{name}", getattr(self, name))
        _fraction("data.held_out", self.held_out)


@dataclass
class OptimConfig:
    """AdamW, a linear warm-up, then a cosine down to a floor. Clipping is train.clip_grad_norm."""

    lr: float = 4e-3
    """The highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int = 30
    floor: float = 0.1
    """The learning rate of the last step, as a share of the highest."""
    weight_decay: float = 0.1
    """For matrices only: no decay on norms."""
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"optim.lr={self.lr} would not train; give a rate above 0")
        if self.warmup_steps < 0:
            raise ConfigError(f"optim.warmup_steps={self.warmup_steps} is below 0; 0 means no warm-up")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"optim.floor={self.floor} is a share of optim.lr; give a number from 0 to 1")
        _fraction("optim.beta1", self.beta1)
        _fraction("optim.beta2", self.beta2)


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key}={value} is too small; give 1 or more")


def _fraction(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{key}={value} is out of range; give a number from 0 up to, but not, 1")
