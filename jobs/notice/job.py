"""A job that learns nothing: it waits for the notice, and each rank leaves word of what it heard (hpc.doctor --signals)."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from hpc.rundir import ATTEMPT_VARIABLE, END_TIME_VARIABLE, RunDirectory
from hpc.train import notice
from hpc.train.job import TrainingJob


class Zeros(Dataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


class Job(TrainingJob):
    def __init__(self, parameters: Any, train: Any) -> None:
        super().__init__(parameters, train)
        self.steps = 0
        atexit.register(self.leave_word)

    def leave_word(self) -> None:
        """One file for each rank and attempt, beside the logs; none outside of a run directory."""
        run = RunDirectory.from_environ()
        if run is None:
            return
        end = os.environ.get(END_TIME_VARIABLE)
        word = {
            "rank": int(os.environ.get("RANK", "0")),
            "host": socket.gethostname(),
            "steps": self.steps,
            "heard": notice.listen().first,
            "left_s": round(float(end) - time.time(), 1) if end else None,
        }
        path = run.attempt(int(os.environ.get(ATTEMPT_VARIABLE, "0"))) / f"notice-{word['rank']}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump(word, stream)

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Tensor]:
        return Zeros(self.parameters.steps * self.train.batch_size)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.0)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.steps += 1
        time.sleep(self.parameters.step_s)
        loss: Tensor = model(batch).square().mean()
        return loss
