"""The rival of a restart inside the allocation: a torchrun script that steps until a file `quick` stands beside its stamps.

Each rank writes when the first step of this start was finished to $BENCH_STAMPS/START.RANK, and its process id to .pid.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

stamps, rank = Path(os.environ["BENCH_STAMPS"]), os.environ["RANK"]
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
(stamps / f"{start}.{rank}.pid").write_text(str(os.getpid()))
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
while True:
    model(torch.randn(6, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 1:
        beside = stamps / f".{start}.{rank}"
        beside.write_text(repr(time.time()))
        beside.rename(stamps / f"{start}.{rank}")  # whole when it is seen
    enough = torch.tensor(float((stamps / "quick").exists()))
    dist.all_reduce(enough)
    if enough.item() > 0:
        break
    time.sleep(0.1)
dist.barrier()
os._exit(0)  # without destructors, which no time of the benchmark includes
