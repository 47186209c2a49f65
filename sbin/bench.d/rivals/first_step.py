"""The user's script, the same for all contestants: a small DDP model's first step, and when it was done.

Each rank writes the time at which its first optimizer step was finished to $BENCH_STAMPS/RANK. It then leaves without
destructors, which the time does not include: with torch 2.13 a rank could wait for ever in Gloo's, for a thread that waits
for the GIL. hpc.node now keeps that from happening in forked workers; fresh interpreters of any launcher may still meet it.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, labels = torch.randn(32, 64), torch.randint(10, (32,))
    loss = torch.nn.functional.cross_entropy(model(samples), labels)
    loss.backward()
    optimizer.step()
    done = time.time()
    Path(os.environ["BENCH_STAMPS"], os.environ["RANK"]).write_text(f"{done!r} {loss.item()!r}\n")
    dist.barrier()
    time.sleep(0.3)  # for the others to get the last of it
    os._exit(0)


if __name__ == "__main__":
    main()
