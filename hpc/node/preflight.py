"""A look at this node's GPUs before workers start; it runs beside the import of torch and so costs no time."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Sequence

from hpc.errors import UnfitNode
from hpc.node import gpuhealth

LIMIT_S = 60.0


LEAST_SHM = 32 << 20
"""Less than this of /dev/shm, and data loaders and NCCL end with a bus error."""


class GpuCheck:
    """Asks the driver for its GPUs with `nvidia-smi -L`; a node where that fails is named before any rendezvous.

    What would only perhaps fail is told: memory errors of GPUs, and too little room in /dev/shm.
    """

    def __init__(self, host: str, visible: Sequence[str]) -> None:
        self._host = host
        self._started = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        self._faults: list[str] = []
        self._asking = threading.Thread(target=self._ask_driver, daemon=True) if visible else None
        if self._asking is not None:
            self._asking.start()
        program = shutil.which("nvidia-smi") if visible else None
        if program is not None:
            self._process = subprocess.Popen(
                [program, "-L"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="backslashreplace",
            )

    def verdict(self) -> list[str]:
        """Wait for the answers, at most 60 s from the start; returns what may become a trouble, in words.

        Raises:
            UnfitNode: the driver answered with an error, or not at all; the node is named.
        """
        self._wait_for_driver()
        if self._asking is not None:  # before anything is forked
            self._asking.join(max(0.1, LIMIT_S - (time.monotonic() - self._started)))
            if self._asking.is_alive():
                raise UnfitNode(
                    f"node {self._host} is unhealthy: the GPU driver (NVML) gave no answer in {LIMIT_S:.0f} s; "
                    f"leave this node out with --exclude {self._host} and tell the cluster's administrators"
                )
        return [*self._faults, *_little_room()]

    def _ask_driver(self) -> None:
        gpus, _ = gpuhealth.ask()
        self._faults += [str(fault) for gpu in gpus for fault in gpu["faults"]]

    def _wait_for_driver(self) -> None:
        if self._process is None:
            return
        advice = f"leave this node out with --exclude {self._host} and tell the cluster's administrators"
        try:
            output, _ = self._process.communicate(timeout=max(0.1, LIMIT_S - (time.monotonic() - self._started)))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise UnfitNode(
                f"node {self._host} is unhealthy: nvidia-smi -L gave no answer in {LIMIT_S:.0f} s; {advice}"
            ) from None
        if self._process.returncode != 0:
            words = " ".join(output.split())[:200] or "no output"
            raise UnfitNode(
                f"node {self._host} is unhealthy: nvidia-smi -L ended with {self._process.returncode} ({words}); {advice}"
            )


def _little_room() -> list[str]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return ["there is no /dev/shm: data loaders and NCCL need it"]
    if free >= LEAST_SHM:
        return []
    return [f"/dev/shm has {free >> 20} MiB free: data loaders and NCCL may end with a bus error"]
