"""A small CNN with BatchNorm on scikit-learn's 1797 handwritten digits of 8 x 8 pixels."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import Dataset, TensorDataset

from hpc.train.job import TrainingJob
from jobs.digits.config import Config

HELD_OUT_EVERY = 5
"""Every fifth image is held out: 360 of 1797, the same ones always."""


class Digits(nn.Module):
    """Images [batch, 1, 8, 8] in 0..1 to logits [batch, 10]."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
        )
        self.classes = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classes(self.features(images).flatten(1))
        return logits


class Job(TrainingJob):
    parameters: Config

    def model(self) -> nn.Module:
        return Digits(self.parameters.model.width, self.parameters.model.dropout)

    def train_data(self) -> Dataset[Any]:
        images, labels = load_digits()
        kept = torch.arange(len(labels)) % HELD_OUT_EVERY != 0
        return TensorDataset(images[kept], labels[kept])

    def eval_data(self) -> Dataset[Any]:
        images, labels = load_digits()
        return TensorDataset(images[::HELD_OUT_EVERY], labels[::HELD_OUT_EVERY])

    def optimizer(self, model: nn.Module) -> Optimizer:
        optim = self.parameters.optim
        return SGD(model.parameters(), lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return OneCycleLR(optimizer, self.parameters.optim.lr, total_steps=total_steps, pct_start=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] float in 0..1 and labels [1797] int64.

    Read from scikit-learn's own file: importing sklearn takes a second or two, and every rank would do it.
    """
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin).parent / "datasets/data/digits.csv.gz" if found and found.origin else None
    if file is not None and file.is_file():
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    else:
        from sklearn import datasets  # a release that keeps the file elsewhere

        bunch = datasets.load_digits()
        table = np.column_stack([bunch.data, bunch.target]).astype(np.float32)
    values = torch.from_numpy(table)
    return values[:, :64].reshape(-1, 1, 8, 8) / 16, values[:, 64].long()
