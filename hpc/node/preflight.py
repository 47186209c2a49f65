"""A look at this node's GPUs before workers start; it runs beside the import of torch and so costs no time."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence

from hpc.errors import NeverStarted

LIMIT_S = 60.0


class GpuCheck:
    """Asks the driver for its GPUs with `nvidia-smi -L`; a node where that fails is named before any rendezvous."""

    def __init__(self, host: str, visible: Sequence[str]) -> None:
        self._host = host
        self._started = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
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

    def verdict(self) -> None:
        """Wait for the answer, at most 60 s from the start.

        Raises:
            NeverStarted: the driver answered with an error, or not at all; the node is named.
        """
        if self._process is None:
            return
        advice = f"leave this node out with --exclude {self._host} and tell the cluster's administrators"
        try:
            output, _ = self._process.communicate(timeout=max(0.1, LIMIT_S - (time.monotonic() - self._started)))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise NeverStarted(
                f"node {self._host} is unhealthy: nvidia-smi -L gave no answer in {LIMIT_S:.0f} s; {advice}"
            ) from None
        if self._process.returncode != 0:
            words = " ".join(output.split())[:200] or "no output"
            raise NeverStarted(
                f"node {self._host} is unhealthy: nvidia-smi -L ended with {self._process.returncode} ({words}); {advice}"
            )
