"""What is kept of the figures of a run: metrics.jsonl and TensorBoard's event files, both written by rank 0."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc.errors import HpcError
from hpc.rundir import RunDirectory


class MetricsError(HpcError):
    """The figures of a run cannot be kept."""


class Metrics:
    """Appends whole lines to metrics.jsonl, and the same figures to TensorBoard.

    A line of training: {"kind": "train", "step", "epoch", "loss", "lr", "samples_per_s", "time"}; of an evaluation:
    {"kind": "eval", "step", "epoch", "samples", and the job's metrics}. A figure that is no finite number is null.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._writer: Any = None
        self._first_step = 0

    def rewind(self, step: int) -> None:
        """Forget what was noted after `step`: an attempt that resumes there will come by again.

        Raises:
            MetricsError: names the file and the cause.
        """
        self._first_step = step + 1
        path = self.run.metrics_file
        lines = [line for line in read(path) if line["step"] <= step]
        if not lines and not path.exists():
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        with _told(path):
            try:
                with open(
                    os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
                ) as stream:
                    stream.writelines(json.dumps(line) + "\n" for line in lines)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(beside, path)
            except OSError:
                beside.unlink(missing_ok=True)
                raise

    def note(self, kind: str, step: int, epoch: int, figures: Mapping[str, float | int]) -> None:
        """Append one line, by one write.

        Raises:
            MetricsError: names the file and the cause.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        line = json.dumps({"kind": kind, "step": step, "epoch": epoch, **finite}) + "\n"
        with _told(self.run.metrics_file):
            _append(self.run.metrics_file, line.encode("ascii"))
        with _told(self.run.tensorboard):
            board = self._tensorboard()
            for name, value in figures.items():
                if name not in ("time", "samples"):
                    board.add_scalar(f"{kind}/{name}", value, step)

    def evaluation(self, step: int) -> dict[str, float] | None:
        """The metrics of the evaluation noted at `step`; None when there was none."""
        for noted in self.evaluations():
            if noted["step"] == step:
                return {name: value for name, value in noted.items() if name not in ("step", "epoch")}
        return None

    def evaluations(self) -> list[dict[str, float]]:
        """ "step", "epoch", "samples" and the metrics of each evaluation that is noted."""
        return [
            {name: math.nan if value is None else value for name, value in line.items() if name != "kind"}
            for line in read(self.run.metrics_file)
            if line.get("kind") == "eval"
        ]

    def close(self) -> None:
        """Write out what TensorBoard has yet to write; where that fails, metrics.jsonl has all of it."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _tensorboard(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # late: about a second of imports, for rank 0 alone

            self.run.tensorboard.mkdir(mode=0o700, exist_ok=True)
            purge = self._first_step if self._first_step > 1 else None
            self._writer = SummaryWriter(str(self.run.tensorboard), purge_step=purge, flush_secs=10)
            for entry in os.scandir(self.run.tensorboard):
                os.chmod(entry.path, 0o600)  # it opens its files by the umask alone
        return self._writer


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise what the file system refuses as a MetricsError that names the path and the cause."""
    try:
        yield
    except OSError as error:
        raise MetricsError(
            f"the figures of the run cannot be written to {path}: {error.strerror or error}; its checkpoints are untouched"
        ) from error


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that tell a step; one torn by a crash is left out, and a missing file has none."""
    lines: list[dict[str, Any]] = []
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return lines
    for text in data.split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
