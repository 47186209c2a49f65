"""The parameters of jobs.imagefolder. No torch here: the login node checks them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc.errors import ConfigError

DEPTHS = (18, 34, 50, 101, 152)


@dataclass
class ModelConfig:
    depth: int = 50
    """Layers of the ResNet: 18, 34, 50, 101 or 152."""
    width: int = 64
    """Channels of the first stage; 64 is the published size, less is for trials."""
    stem: str = "imagenet"
    """"imagenet": 7x7 with stride 2, then max-pooling; "small": one 3x3, for images of 32 or 64 pixels."""
    channels_last: bool = False
    """Keep channels innermost in memory: quicker on tensor cores, with train.precision=bf16 or fp16."""

    def __post_init__(self) -> None:
        if self.depth not in DEPTHS:
            raise ConfigError(f"model.depth={self.depth} is no ResNet; give one of {', '.join(map(str, DEPTHS))}")
        if self.width < 1:
            raise ConfigError(f"model.width={self.width} is too small; give 1 or more")
        _one_of("model.stem", self.stem, ("imagenet", "small"))


@dataclass
class DataConfig:
    root: str = ""
    """The folder with train/<class>/... and val/<class>/...; needed, and best as an absolute path that all nodes see."""
    index: str | None = None
    """A list of the images, written once by `python -m jobs.imagefolder.index ROOT`; null lists the folder in every rank."""
    size: int = 224
    """Pixels of a side of the square that the model sees."""
    eval_resize: int = 256
    """Pixels of the shorter side in evaluation, before the middle square of data.size is cut out."""
    crop_min_area: float = 0.08
    """Smallest share of an image's area that a random crop may take in training."""
    flip: bool = True
    """Mirror every second training image, left to right."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"data.size={self.size} is too small; give 1 pixel or more")
        if self.eval_resize < self.size:
            raise ConfigError(
                f"data.eval_resize={self.eval_resize} is less than data.size={self.size}, which is cut out of it; "
                f"give both, e.g. data.eval_resize={self.size * 8 // 7}"
            )
        if not 0 < self.crop_min_area <= 1:
            raise ConfigError(f"data.crop_min_area={self.crop_min_area} is out of range; give a share above 0, up to 1")


@dataclass
class OptimConfig:
    """SGD with momentum, a linear warm-up, then a cosine or steps."""

    lr: float = 0.1
    """The highest learning rate; for a global batch of 256. Scale it with train.batch_size."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    """Not for BatchNorm and biases."""
    warmup_epochs: float = 5.0
    schedule: str = "cosine"
    """"cosine" down to 0 at the end, or "step": a tenth after each of step_epochs."""
    step_epochs: list[float] = field(default_factory=lambda: [30.0, 60.0, 80.0])
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"optim.lr={self.lr} would not train; give a rate above 0")
        if self.warmup_epochs < 0:
            raise ConfigError(f"optim.warmup_epochs={self.warmup_epochs} is below 0; 0 means no warm-up")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"optim.label_smoothing={self.label_smoothing} is out of range; give 0 up to, but not, 1")
        if self.nesterov and self.momentum <= 0:
            raise ConfigError(
                f"optim.nesterov=true with optim.momentum={self.momentum}: Nesterov needs momentum above 0"
            )
        _one_of("optim.schedule", self.schedule, ("cosine", "step"))


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if not self.data.root:
            raise ConfigError("data.root is not set; give data.root=FOLDER with train/<class>/ and val/<class>/ in it")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is unknown; give {' or '.join(choices)}")
