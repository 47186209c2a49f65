"""One run, one directory: fixed at submission, the same for every attempt and every rank.

    runs/<name>-<id>/
      config.yaml  job.sh  record.jsonl           what was asked, what was sent, what happened
      slurm-<job id>.out                          the screen of the batch step
      code/                                       the code as it was at submission
      attempt-0/ attempt-1/ ...                   rank-<n>.log, error-<rank>.json
      checkpoints/step-<n>/  metrics.jsonl  tensorboard/

The directory is 0700 and its files 0600, whatever the umask, unless the user opens them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc.errors import RunDirectoryError, printable
from hpc.schema import Config

RUN_DIR_VARIABLE = "HPC_RUN_DIR"
ATTEMPT_VARIABLE = "HPC_ATTEMPT"
RESTART_VARIABLE = "HPC_RESTART"
"""Starts of the step in this allocation before the present one."""
BEGAN_VARIABLE = "HPC_BEGAN"
"""When the controller began with this start, in seconds since 1970."""
END_TIME_VARIABLE = "HPC_END_TIME"
"""When the allocation ends, in seconds since 1970; unset when nobody knows."""
MARK_VARIABLE = "HPC_MARK"
"""One start of the step: job id, restart count, start and a random word, "1234.0.1.9f3a51c2"; "local..." without a job."""
WORKDIR_VARIABLE = "HPC_WORKDIR"
"""The directory to work in, for a process that was started in the copy of the code so that it imports from there."""
RECORD_LIMIT = 64 * 1024
_TRIES = 20


class RunDirectory:
    """The paths of one run, and its record. Make one with `create` or `open`, which check whose it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.job_script = path / "job.sh"
        self.record_file = path / "record.jsonl"
        self.code = path / "code"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(cls, root: Path, name: str, run_id: str | None = None) -> RunDirectory:
        """Make `root/name-run_id` (a new unique id when None) and return it; an existing one of ours is opened.

        Raises:
            RunDirectoryError: it cannot be made, or what is there belongs to or can be written by somebody else.
        """
        for tries_left in reversed(range(_TRIES)):
            path = Path(os.path.abspath(root)) / f"{name}-{run_id or new_run_id()}"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700, exist_ok=run_id is not None)
            except OSError as error:
                if isinstance(error, FileExistsError) and run_id is None and path.is_dir() and tries_left:
                    continue  # somebody drew the same id in the same second
                raise RunDirectoryError(
                    f"cannot make the run directory {path}: {error.strerror or error}; "
                    f"give another place with run_root=DIR"
                ) from None
            break
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run directory at `path`, after a check that nobody else can have put things into it.

        Raises:
            RunDirectoryError: not a directory, a link, owned by somebody else, or writable by others.
        """
        path = Path(os.path.abspath(path))
        try:
            status = os.lstat(path)
        except OSError as error:
            raise RunDirectoryError(f"run directory {path}: {error.strerror or error}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise RunDirectoryError(f"{path} is not a directory (links are refused); a run directory was needed")
        if status.st_uid != os.geteuid():
            raise RunDirectoryError(
                f"{path} belongs to user id {status.st_uid}, not to you ({os.geteuid()}): "
                f"use a directory of your own, run_root=DIR"
            )
        if status.st_mode & 0o022:
            raise RunDirectoryError(
                f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w {path}"
            )
        return cls(path)

    @classmethod
    def from_environ(cls) -> RunDirectory | None:
        """The run directory that the controller named for this process, or None."""
        text = os.environ.get(RUN_DIR_VARIABLE)
        return cls(Path(text)) if text else None

    def attempt(self, number: int) -> Path:
        """The folder of one attempt (not made here)."""
        return self.path / f"attempt-{number}"

    def output_file(self, job_id: str) -> Path:
        """What the batch step prints; `job_id` may be Slurm's pattern "%j"."""
        return self.path / f"slurm-{job_id}.out"

    def append_event(self, event: str, **fields: Any) -> None:
        """Append one event to the record: one whole line, by one write, so that writers never mix.

        Raises:
            ValueError: the event is longer than 64 KiB.
        """
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}, ensure_ascii=False) + "\n"
        data = line.encode("utf-8", "backslashreplace")
        if len(data) > RECORD_LIMIT:
            raise ValueError(f"an event of {len(data)} bytes: the record takes {RECORD_LIMIT}")
        descriptor = os.open(self.record_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the record, in order; a line torn by a crash is left out."""
        try:
            data = self.record_file.read_bytes()
        except FileNotFoundError:
            return
        for line in data.split(b"\n"):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def run_name(config: Config) -> str:
    """The run's name: the given one, else that of the training job, the script or the module that runs."""
    if config.name is not None:
        return config.name
    words = list(config.command)
    if not words:
        return config.job.rpartition(".")[2]
    if re.fullmatch(r"python[0-9.]*", Path(words[0]).name) and len(words) > 1:
        words = [word for word in words[1:] if word not in ("-m", "-u")] or words
    return Path(words[0]).name.removesuffix(".py") or "command"


def directory_name(name: str) -> str:
    """The run's name as part of a directory name: letters, digits, "._-" kept, all else "_", at most 60 characters."""
    return re.sub(r"[^\w.-]", "_", name)[:60].lstrip("-.") or "run"


def new_run_id() -> str:
    """A new id that sorts by time: "20261130-041500-9f3a"."""
    return time.strftime("%Y%m%d-%H%M%S-", time.localtime()) + secrets.token_hex(2)


def write_private(path: Path, text: str) -> None:
    """Write a UTF-8 text of mode 0600, whole or not at all: beside it, then renamed over it.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(beside, path)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {printable(str(path))}: {error.strerror or error}") from None
