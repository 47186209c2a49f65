"""jobs.gpt: a byte-level GPT trained on the text of Python's own standard library. Nothing is downloaded.

    python -m hpc.submit --local jobs.gpt                          two CPU cores, about a minute
    python -m hpc.submit --nodes 2 --gpus-per-node 8 jobs.gpt model.layers=12 model.width=768 model.heads=12 \\
        data.context=1024 data.max_bytes=null data.max_eval_bytes=null \\
        train.batch_size=512 train.epochs=20 train.precision=bf16 optim.lr=6e-4 optim.warmup_steps=30

The measure is bits per byte over the held-out files, every byte once: 8 is knowing nothing. With base.yaml as it
is, the run must end below GOAL_BITS_PER_BYTE; tests/test_jobs_gpt.py holds it to that.

Text: the .py files of the standard library (sysconfig's "stdlib"), without tests, site-packages and what
LEFT_OUT in text.py names; 5 % of the files, chosen by a hash of their path, are held out. Any other text:
data.folder=FOLDER data.suffix=.txt. Every rank reads the text once, from its own node, so all nodes need the
same version of Python or the same folder; data.max_bytes limits how many files are opened.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpc.train.job import TrainingJob
from jobs.gpt.config import OptimConfig
from jobs.gpt.model import Gpt
from jobs.gpt.text import IGNORED, Windows, read_split

GOAL_BITS_PER_BYTE = 3.0
"""What base.yaml's run ends below, on held-out files."""


class Job(TrainingJob):
    """See the module; `parameters` is a jobs.gpt.config.Config."""

    def model(self) -> nn.Module:
        return Gpt(self.parameters.model)

    def train_data(self) -> Windows:
        data = self.parameters.data
        return Windows(read_split(data, held_out=False), data.context, pad=False)

    def eval_data(self) -> Windows | None:
        data = self.parameters.data
        if data.held_out == 0:
            return None
        return Windows(read_split(data, held_out=True), data.context, pad=True)

    def optimizer(self, model: nn.Module) -> Optimizer:
        optim = self.parameters.optim
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        on_gpu = any(p.is_cuda for p in parameters)
        return AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=on_gpu or None)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        optim = self.parameters.optim
        return LambdaLR(optimizer, lambda step: rate_factor(step, total_steps, optim))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch  # both [batch, seq] int64
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Any, Any]]:
        """Bits and bytes of this batch: {"bits_per_byte": (bits, bytes)}."""
        tokens, targets = batch
        logits = model(tokens).flatten(0, 1).float()
        nats = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"bits_per_byte": (nats.double() / math.log(2), (targets != IGNORED).sum())}


def rate_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """The learning rate of this step (0 is the first) as a share of optim.lr: up to 1 in a line, then a cosine to the floor.

    A run shorter than the warm-up warms up for half of it.
    """
    warmup = min(optim.warmup_steps, total_steps // 2)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    return optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * done))
