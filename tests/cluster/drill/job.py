"""Sample i carries i. Each rank of each start keeps a diary: one whole line of JSON per thing it does, written at once."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from hpc.train.job import TrainingJob

FEATURES = 6
RUN = Path(os.environ["HPC_RUN_DIR"])


class Diary:
    """RUN/diary/<start>.<rank>.<pid>.jsonl; the ranks of one start share its first name."""

    def __init__(self) -> None:
        folder = RUN / "diary"
        folder.mkdir(exist_ok=True)
        start = f"{os.environ['HPC_ATTEMPT']}-{os.environ['MASTER_PORT']}"
        path = folder / f"{start}.{os.environ['RANK']}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, did: str, **facts: Any) -> None:
        os.write(self._file, (json.dumps({"time": time.time(), "did": did, **facts}) + "\n").encode())


def dawdle(seconds: float) -> None:
    """Take this long, but no longer than until the test wants the run to be quick."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (RUN / "quick").exists():
        time.sleep(min(0.05, seconds))


class Numbers(Dataset[Any]):
    """Sample i: features that depend on i and on chance, a target, and i itself."""

    def __init__(self, samples: int, noise: float) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        features = torch.sin(torch.arange(1, FEATURES + 1) * (index + 1.0))
        if self.noise:
            features = features + self.noise * torch.randn(FEATURES)
        return features, torch.cos(torch.tensor(float(index))), torch.tensor(index)


class Net(nn.Module):
    def __init__(self, ballast_mib: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.register_buffer("ballast", torch.zeros(ballast_mib * 2**18))

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).squeeze(1)


class Job(TrainingJob):
    def __init__(self, parameters: Any, train: Any) -> None:
        super().__init__(parameters, train)
        self.rank = int(os.environ["RANK"])
        self.diary = Diary()
        self.diary.note("begin")
        dawdle(parameters.begin_s if self.rank == 1 else 0.0)
        if self.rank == 0:
            sync = os.fsync

            def fsync(descriptor: int) -> None:
                if ".step-" in os.readlink(f"/proc/self/fd/{descriptor}"):
                    self.diary.note("save")
                    dawdle(parameters.save_s)
                sync(descriptor)

            os.fsync = fsync

    def model(self) -> nn.Module:
        return Net(self.parameters.ballast_mib)

    def train_data(self) -> Dataset[Any]:
        self.diary.note("data")
        dawdle(self.parameters.data_s if self.rank == 1 else 0.0)
        return Numbers(self.parameters.samples, noise=0.1)

    def eval_data(self) -> Dataset[Any]:
        return Numbers(self.parameters.held_out, noise=0.0)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05, momentum=0.9)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        self.total = total_steps
        self.schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8) * (1 - step / (2 * total_steps)))
        return self.schedule

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets, ids = batch
        step = self.schedule.last_epoch + 1
        self.diary.note("step", step=step, ids=ids.tolist())
        self.have_trouble(step)
        if step == self.total and self.parameters.last_s:
            dawdle(self.parameters.last_s)
        elif step >= 10:
            dawdle(self.parameters.step_s)
        return functional.mse_loss(model(features), targets)

    def have_trouble(self, step: int) -> None:
        kind = self.parameters.trouble
        if not kind or (step, self.rank) != (self.parameters.trouble_step, self.parameters.trouble_rank):
            return
        try:
            (RUN / "trouble").touch(exist_ok=False)
        except FileExistsError:
            return
        if kind == "raise":
            raise ValueError("bad batch 17")
        if kind == "exit":
            os._exit(41)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, resource.RLIM_INFINITY))
        torch.zeros(2**28)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        features, targets, ids = batch
        self.diary.note("evaluate", step=self.schedule.last_epoch)
        dawdle(self.parameters.evaluate_s)
        error = functional.mse_loss(model(features), targets, reduction="sum")
        return {"mean_id": (ids.sum(), len(ids)), "error": (error, len(ids))}
