"""The agent's signals: handlers only take a note; the loop reads them from a pipe.

Before there are workers, a warning (USR1, USR2) is noted for them, and a signal that ends (SIGTERM, SIGINT) ends this
process at once, by what was set with `Startup.on_end`: nothing is lost, and nobody waits for an import.
Source: Python's documentation, signal.set_wakeup_fd.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
ENDS = (signal.SIGTERM, signal.SIGINT)

_startup: Startup | None = None


class Startup:
    """What has come since the first line of this process and before its workers could be told."""

    def __init__(self) -> None:
        self.warnings: list[signal.Signals] = []
        self._ended_by: signal.Signals | None = None
        self._on_end: Callable[[signal.Signals], None] | None = None
        self._process = os.getpid()
        for number in (*WARNINGS, *ENDS):
            signal.signal(number, self._note)

    def also(self, warning: signal.Signals) -> None:
        """The warning that was chosen is one too, unless it is one that ends."""
        if warning not in ENDS:
            signal.signal(warning, self._note)

    def on_end(self, end: Callable[[signal.Signals], None]) -> None:
        """Call `end` when a signal asks this process to end: now, if one has come already."""
        self._on_end = end
        if self._ended_by is not None:
            end(self._ended_by)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a fork that has not put back its own handlers yet
        if number not in ENDS:
            self.warnings.append(signal.Signals(number))
            return
        self._ended_by = self._ended_by or signal.Signals(number)
        if self._on_end is not None:
            self._on_end(self._ended_by)


def listen(*, anew: bool = False) -> Startup:
    """Take note of signals from now on; a second call changes nothing, unless it is to begin `anew`."""
    global _startup
    if _startup is None or anew:
        _startup = Startup()
    return _startup


class SignalPipe:
    """Collects signals so that a selector wakes up for them; `read` gives them in the order of arrival."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = tuple(numbers)
        # the pipe first: between the two, the handlers of the start-up still take their notes
        self._before_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, _take_note)

    def read(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            data = os.read(self.reader, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in data if number in self._signals]

    def close(self) -> None:
        """In a forked child: what a fresh process would have."""
        signal.set_wakeup_fd(self._before_wakeup)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        os.close(self.reader)
        os.close(self._writer)


def hold(numbers: Iterable[signal.Signals]) -> None:
    """Hold back these signals, around a fork: none may come between it and the child's own handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def release() -> None:
    """Let in again what was held back."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def has_handler(pid: int, number: int) -> bool:
    """Whether a process would run a handler of its own for the signal now.

    In a new fork the agent's handlers still stand, but the signal is held back. Source: proc_pid_status(5).
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
            masks = dict(line.split(":", 1) for line in stream if line.startswith("Sig"))
        caught, held = (int(masks[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigBlk"))
    except (OSError, KeyError, ValueError):
        return False
    return bool(caught and not held)


def _take_note(number: int, frame: FrameType | None) -> None:
    """Nothing: the interpreter has written the number into the pipe already."""
