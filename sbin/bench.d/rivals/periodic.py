"""What people write by hand to come back: DDP, a torch.save of everything by rank 0 each few seconds, the newest one first.

Each rank notes the time and the number of each step it begins. It steps for ever; a step mostly sleeps.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch_save
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    """`save` may be called at any time by rank 0."""

    def __init__(self, start: str) -> None:
        folder = Path(os.environ["BENCH_FOLDER"])
        self.save_s, self.step_s = float(os.environ["BENCH_SAVE_S"]), float(os.environ["BENCH_STEP_S"])
        self.file, self.step = folder / "state.pt", 0
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        path = folder / "diary" / f"{start}.{self.rank}.{os.getpid()}"
        self.diary = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.model = DistributedDataParallel(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            layers.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self) -> None:
        model, optimizer = self.model.module.state_dict(), self.optimizer.state_dict()
        torch_save.save_durably({"model": model, "optimizer": optimizer, "step": self.step}, self.file)

    def train(self) -> None:
        saved = time.monotonic()
        while True:
            os.write(self.diary, f"{time.time()!r} {self.step + 1}\n".encode())
            time.sleep(self.step_s)
            self.model(torch.randn(2, 6)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.rank == 0 and time.monotonic() - saved >= self.save_s:
                saved = time.monotonic()
                self.save()


if __name__ == "__main__":
    attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
    Trainer(f"{attempt}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").train()
