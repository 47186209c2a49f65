"""The toy job."""

from __future__ import annotations

import ctypes
import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from hpc.train.job import TrainingJob
from toy.config import Config

FEATURES = 6


class Numbers(Dataset[Any]):
    """Sample i: features [6] that depend on i, a target, and i itself."""

    def __init__(self, samples: int, noise: float = 0.0, stuck: int = -1) -> None:
        self.samples = samples
        self.noise = noise
        self.stuck = stuck

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if index == self.stuck:
            Path("stuck.pid").write_text(str(os.getpid()))
            time.sleep(600)
        features = torch.sin(torch.arange(1, FEATURES + 1) * (index + 1.0))
        if self.noise:
            features = features + self.noise * torch.randn(FEATURES)
        return features, torch.cos(torch.tensor(float(index))), torch.tensor(index)


class Net(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, config.width)
        self.norm = nn.BatchNorm1d(config.width) if config.batchnorm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.last = nn.Linear(config.width, 1)
        if config.unused:
            self.forgotten = nn.Linear(3, 3)
        self.register_buffer("ballast", torch.zeros(config.ballast_mib * 2**18))

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(features))))).squeeze(1)


class Job(TrainingJob):
    parameters: Config

    def __init__(self, parameters: Any, train: Any) -> None:
        super().__init__(parameters, train)
        self.rank = int(os.environ.get("RANK", "0"))
        self.counts: dict[str, int] = {}
        if parameters.trouble.startswith("group"):
            os.setsid()
        if parameters.slow_sync_s or parameters.trouble_at == "sync":
            sync = os.fsync

            def fsync(descriptor: int) -> None:
                self.passing("sync")
                if parameters.slow_sync_only in (0, self.counts["sync"]):
                    time.sleep(parameters.slow_sync_s)
                sync(descriptor)

            os.fsync = fsync
        if parameters.only_zero_makes_folders and self.rank > 0:
            os.mkdir = refuse_folder
            os.path.isdir = lambda path: False

    def model(self) -> nn.Module:
        return Net(self.parameters)

    def passing(self, place: str) -> None:
        """Trouble, when this is its place and time; from then on it is slow here."""
        parameters, count = self.parameters, self.counts.get(place, 0) + 1
        self.counts[place] = count
        if parameters.trouble_at == place and count == parameters.trouble_step:
            if parameters.trouble_rank in (self.rank, -1):
                make_trouble(parameters.trouble)
        if parameters.slow_after_s and self.counts.get(parameters.trouble_at, 0) >= parameters.trouble_step:
            time.sleep(parameters.slow_after_s)
        if parameters.slow_elsewhere_s and place == "loss" and self.rank != parameters.trouble_rank:
            time.sleep(parameters.slow_elsewhere_s)

    def train_data(self) -> Dataset[Any]:
        self.passing("data")
        return Numbers(self.parameters.samples, self.parameters.noise, self.parameters.stuck_sample)

    def eval_data(self) -> Dataset[Any] | None:
        return Numbers(self.parameters.held_out) if self.parameters.held_out else None

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.parameters.optimizer == "adamw":
            return AdamW(model.parameters(), lr=self.parameters.lr)
        return SGD(model.parameters(), lr=self.parameters.lr, momentum=0.9)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4) * (1 - step / (2 * total_steps)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        features, targets, ids = batch
        if self.parameters.folder:
            with open(Path(self.parameters.folder) / f"ids-{self.rank}.jsonl", "a") as stream:
                print(json.dumps(ids.tolist()), file=stream)
            mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/checkpoints/" in line]
            (Path(self.parameters.folder) / f"mapped-{self.rank}").write_text("\n".join(mapped))
        self.passing("loss")
        return functional.mse_loss(model(features), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        features, targets, ids = batch
        self.passing("evaluate")
        error = functional.mse_loss(model(features), targets, reduction="sum")
        return {"mean_id": (ids.sum(), len(ids)), "error": (error, len(ids))}


def refuse_folder(path: str, *_: object, **__: object) -> None:
    raise FileExistsError(17, "a rank other than 0 makes a folder", path)


def see_read_only(folder: str) -> None:
    """From now on this process alone sees the folder as a node does whose file system has become read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, bind, remount = 0x20000, 0x44000, 0x1000, 0x1021  # sched.h, sys/mount.h
    done = libc.unshare(new_namespace) or libc.mount(None, b"/", None, private, None)
    done = done or libc.mount(folder.encode(), folder.encode(), None, bind, None)
    done = done or libc.mount(None, folder.encode(), None, remount, None)
    if done:
        raise OSError(ctypes.get_errno(), "no namespace of its own can be made")


def make_trouble(kind: str) -> None:
    kind, *names = kind.split()
    for number, name in enumerate(names):
        time.sleep(0.2 if number else 0.0)
        target = 0 if kind == "group" else os.getpid()
        os.kill(target, signal.Signals[f"SIG{name}"])
    if kind in ("notice", "group"):
        return
    if kind == "readonly":
        see_read_only(os.path.realpath("run"))
        return
    if kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "exit":
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # a save that is under way: tests count on it
                thread.join(30)
        os._exit(41)
    elif kind == "raise":
        raise ValueError("bad batch 17")
    elif kind == "sleep":
        time.sleep(600)
    elif kind == "signal":
        for child in multiprocessing.active_children():
            for name in (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
                os.kill(child.pid, name)
    else:
        raise AssertionError(f"no trouble is called {kind}")
