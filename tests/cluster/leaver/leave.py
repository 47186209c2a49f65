"""A script with everything that jobs leave behind: loader workers, a child in a session of its own, a double-forked one,
shared memory, temporary files and a port. leave.py KIND FOLDER; FOLDER/RANK.json says what there is, FOLDER/go lets it end.
"""

import json
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.zeros(1000)


def main(kind: str, folder: Path) -> None:
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.multiprocessing.set_sharing_strategy("file_system")
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "sleep 3600 & exit 0"], start_new_session=True).wait()
    server = socket.create_server(("127.0.0.1", 0))
    batches = iter(DataLoader(Slow(), batch_size=2, num_workers=2))
    kept = [next(batches)]
    facts = {
        "pid": os.getpid(),
        "node": os.environ["SLURMD_NODENAME"],
        "port": server.getsockname()[1],
        "paths": [tempfile.mkdtemp(), multiprocessing.util.get_temp_dir()],
    }
    beside = folder / f".{rank}"
    beside.write_text(json.dumps(facts))
    beside.rename(folder / f"{rank}.json")
    while not (folder / "go").exists():
        kept = [*kept[-3:], next(batches)]
    if rank == 1 and kind == "exception":
        raise ValueError("one rank fails")
    if rank == 1 and kind == "exit":
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
