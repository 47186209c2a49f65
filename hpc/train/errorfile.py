"""The file in which a failing worker says why: TORCHELASTIC_ERROR_FILE, in the form that torchrun reads."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
import traceback
from pathlib import Path

from hpc.errors import HpcError
from hpc.train.distributed import CollectiveTimeout


class ErrorFile:
    """Written as soon as an exception is seen, before anything is torn down, so that its time tells who failed first.

    {"message": {"message": "ValueError: ...", "extraInfo": {"py_callstack": "...", "timestamp": "1764475800", ...}}}
    An error of this package that says what to do by itself has no callstack; torchrun then shows its message.
    Source of the form: torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    """

    def __init__(self, rank: int) -> None:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self._path = Path(path) if path else None
        self._rank = rank
        self._noted: BaseException | None = None
        self._time = 0.0

    def note(self, error: BaseException) -> None:
        """Write the error. A later one that explains it takes its place, with the time of the first."""
        if self._path is None or error is self._noted:
            return
        self._time = self._time or time.time()
        self._noted = error
        extra = {
            "timestamp": str(int(self._time)),
            "time": round(self._time, 3),
            "rank": self._rank,
            "host": socket.gethostname(),
        }
        if not _says_all(error):
            extra["py_callstack"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(text)
            os.replace(beside, self._path)
        except OSError:
            return  # the folder is gone or full: the error itself is what has to be seen


def _says_all(error: BaseException) -> bool:
    """Whether the message alone tells what was found: not where a rank stood when it gave up waiting, nor in the job's code."""
    known = isinstance(error, HpcError) and not isinstance(error, CollectiveTimeout)
    return known and (error.__cause__ is None or isinstance(error.__cause__, OSError))
