"""What workers print: to their log files as it comes, and to the screen in whole lines with the rank in front."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LINE_LIMIT = 8192
VISIBLE_LIMIT_S = 60.0
STAMP_EVERY_S = 0.5
"""How exactly it is known when a line came."""


class WorkerStream:
    """One pipe from a worker (its stdout or stderr), copied to its log and to the screen."""

    def __init__(self, log: RankLog | None, screen: int, prefix: bytes) -> None:
        """`screen`: the descriptor of this process's own stdout or stderr."""
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)
        self._log, self._screen, self._prefix = log, screen, prefix
        self._partial = b""

    def copy(self) -> bool:
        """Copy what has come; False when every writer has closed its end."""
        while True:
            try:
                data = os.read(self.reader, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            if self._log is not None:
                self._log.write(data)
            self._show(data)

    def _show(self, data: bytes) -> None:
        if not self._prefix:
            self._emit(data)
            return
        text = self._partial + data
        # a progress bar ends its line with a carriage return: each state of it becomes a line of its own
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not end and len(text) > LINE_LIMIT:
            end = _whole_characters(text)
        whole, self._partial = text[:end], text[end:]
        lines = [line for line in whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")]
        if lines and not lines[-1]:
            lines.pop()
        if lines:
            self._emit(b"".join(self._prefix + line + b"\n" for line in lines))

    def _emit(self, data: bytes) -> None:
        """Not by Python's own writing: unbuffered (-u) it drops the rest of what a signal interrupts."""
        _write_all(self._screen, data)  # when nobody looks any more, or its disk is full, the log file has it

    def finish(self) -> None:
        """Copy what is left and close this end, without waiting for descendants that still hold the other."""
        self.copy()
        if self._partial:
            self._emit(self._prefix + self._partial + b"\n")
            self._partial = b""
        os.close(self.reader)

    def close_writer(self) -> None:
        """Close the worker's end in the agent, once the worker has it."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close both ends, in a forked worker after its streams are in place."""
        self.close_writer()
        os.close(self.reader)


class RankLog:
    """A rank's log file: bytes as they come, and beside it, in rank-<n>.times, now and then when they came.

    A line of the times: seconds since 1970, by the clock of rank zero's node, and the size that the log had then. Both
    descriptors append.
    """

    def __init__(self, descriptor: int, times: int | None, clock_offset_s: float = 0.0) -> None:
        """`clock_offset_s`: what that clock is ahead of this node's."""
        self._descriptor, self._times, self._clock_offset_s = descriptor, times, clock_offset_s
        self._size = os.fstat(descriptor).st_size
        self._stamped = float("-inf")

    def write(self, data: bytes) -> None:
        """Add what a worker has printed."""
        now = time.time()
        if self._times is not None and not 0.0 <= now - self._stamped < STAMP_EVERY_S:
            self._stamped = now
            _write_all(self._times, f"{now + self._clock_offset_s:.3f} {self._size}\n".encode())
        self._size += _write_all(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._times is not None:
            os.close(self._times)


def _whole_characters(text: bytes) -> int:
    """How much of a text can be cut off without cutting through a character of UTF-8. Source: utf-8(7)."""
    for back in range(1, 5):
        if text[-back] & 0xC0 != 0x80:  # no byte that continues a character
            return len(text) - back if text[-back] >= 0xC0 else len(text)
    return len(text)


def _write_all(descriptor: int, data: bytes) -> int:
    """Write as much as goes, and return how much that was: a full disk must not stop the training."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]
    return len(data) - len(view)


def open_log(folder: Path | None, rank: int, clock_offset_s: float = 0.0) -> RankLog | None:
    """Open `folder/rank-<n>.log` for appending, mode 0600; None without a folder, or when it cannot be written.

    The folder is made by the controller. On a shared file system other nodes may see it late: it is waited for,
    never made here.
    """
    if folder is None:
        return None
    deadline = time.monotonic() + VISIBLE_LIMIT_S
    while True:
        try:
            descriptor = _append_to(folder / f"rank-{rank}.log")
            break
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.2)
        except OSError:
            return None
    try:
        return RankLog(descriptor, _append_to(folder / f"rank-{rank}.times"), clock_offset_s)
    except OSError:
        return RankLog(descriptor, None)


def _append_to(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
