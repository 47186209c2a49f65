"""Each rank notes the time and the number of each step it begins in a file of its start, and has accidents when told to."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from hpc.train.job import TrainingJob

RUN = Path(os.environ["HPC_RUN_DIR"])
FEATURES = 6


class Numbers(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(torch.arange(1, FEATURES + 1) * (index + 1.0))


class Job(TrainingJob):
    def __init__(self, parameters: Any, train: Any) -> None:
        super().__init__(parameters, train)
        self.rank = os.environ["RANK"]
        start = f"{os.environ['HPC_ATTEMPT']}-{os.environ['MASTER_PORT']}"
        (RUN / "diary").mkdir(exist_ok=True)
        path = RUN / "diary" / f"{start}.{self.rank}.{os.getpid()}"
        self.diary = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def train_data(self) -> Dataset[Any]:
        return Numbers(self.parameters.samples)

    def eval_data(self) -> Dataset[Any]:
        return Numbers(4)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        self.schedule = LambdaLR(optimizer, lambda step: 1.0)
        return self.schedule

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        os.write(self.diary, f"{time.time()!r} {self.schedule.last_epoch + 1}\n".encode())
        time.sleep(self.parameters.step_s)
        self.have_accident()
        return model(batch).square().mean()

    def have_accident(self) -> None:
        order = RUN / f"accident.{self.rank}"
        if not order.exists():
            return
        kind = order.read_text()
        order.unlink()
        if kind == "memory":
            eaten = []
            while True:  # until the kernel ends it
                eaten.append(bytearray(os.urandom(1)) * (1 << 24))
        ctypes.string_at(0)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        return {"size": (model(batch).sum(), len(batch))}
