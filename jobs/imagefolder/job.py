"""jobs.imagefolder: ResNet on a folder of images, data.root/train/<class>/*.jpg|png and data.root/val/<class>/...

    python -m hpc.submit --local jobs.imagefolder data.root=/data/flowers model.depth=18 train.epochs=10 optim.warmup_epochs=1
    python -m jobs.imagefolder.index /data/imagenet
    python -m hpc.submit --nodes 4 --gpus-per-node 8 jobs.imagefolder data.root=/data/imagenet \\
        data.index=/data/imagenet/index.txt train.precision=bf16 model.channels_last=true train.batch_size=2048 optim.lr=0.8

The measure is the share of held-out images whose class is named first (accuracy) or among the first five
(top5_accuracy). Classes are the folders of train/, sorted. Many ranks need data.index: index.py says why.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpc.train.job import TrainingJob
from jobs.imagefolder.config import OptimConfig
from jobs.imagefolder.images import Images
from jobs.imagefolder.index import Split, read_splits
from jobs.imagefolder.model import ResNet

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's training pixels, in [0, 1], red, green, blue; published models are trained with these."""


class Job(TrainingJob):
    """See the module; `parameters` is a jobs.imagefolder.config.Config."""

    def model(self) -> nn.Module:
        model = ResNet(self.parameters.model, classes=len(self._splits["train"].classes))
        if self.parameters.model.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def train_data(self) -> Images:
        return Images(self._splits["train"], self.parameters.data, augment=True)

    def eval_data(self) -> Images:
        return Images(self._splits["val"], self.parameters.data, augment=False)

    def optimizer(self, model: nn.Module) -> Optimizer:
        optim = self.parameters.optim
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        optim, epochs = self.parameters.optim, self.train.epochs
        return LambdaLR(optimizer, lambda step: rate_factor(step, total_steps, epochs, optim))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch  # [batch, 3, size, size] uint8, [batch] int64
        return F.cross_entropy(
            model(self._normalised(images)).float(), labels, label_smoothing=self.parameters.optim.label_smoothing
        )

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
        """Hits and images of this batch: {"accuracy": (hits, images), "top5_accuracy": (hits, images)}."""
        images, labels = batch
        logits = model(self._normalised(images))  # [batch, classes]
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = best == labels[:, None]
        return {"accuracy": (hits[:, 0].sum(), len(labels)), "top5_accuracy": (hits.sum(), len(labels))}

    @functools.cached_property
    def _splits(self) -> dict[str, Split]:
        data = self.parameters.data
        return read_splits(Path(data.root), None if data.index is None else Path(data.index))

    def _normalised(self, images: Tensor) -> Tensor:
        mean, deviation = _statistics(images.device)
        pixels = (images.float() / 255 - mean) / deviation
        return pixels.contiguous(memory_format=torch.channels_last) if self.parameters.model.channels_last else pixels


def rate_factor(step: int, total_steps: int, epochs: int, optim: OptimConfig) -> float:
    """The learning rate of this step (0 is the first) as a share of optim.lr: up to 1 in a line, then down.

    Epochs are counted as shares of the run. A run shorter than the warm-up warms up for half of it.
    """
    warmup = min(round(total_steps * optim.warmup_epochs / epochs), total_steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    if optim.schedule == "step":
        return 0.1 ** sum(step * epochs >= end * total_steps for end in optim.step_epochs)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total_steps - warmup))))


@functools.cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation, each [3, 1, 1] float32; kept on the device, so that no step waits for a copy."""
    return torch.tensor(MEAN, device=device).view(3, 1, 1), torch.tensor(DEVIATION, device=device).view(3, 1, 1)
