"""The agent's signals: handlers only take a note; the loop reads them from a pipe.

Source: Python's documentation, signal.set_wakeup_fd.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
IGNORED_BY_COMMANDS = (signal.SIGUSR1, signal.SIGUSR2)


class SignalPipe:
    """Collects signals so that a selector wakes up for them; `read` gives them in the order of arrival."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals = tuple(signals)
        self._before = {number: signal.signal(number, _take_note) for number in self._signals}
        self._before_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def read(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            data = os.read(self.reader, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in data if number in self._signals]

    def close(self) -> None:
        """Put back what was there before; in a forked child too."""
        signal.set_wakeup_fd(self._before_wakeup)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self.reader)
        os.close(self._writer)


def _take_note(number: int, frame: FrameType | None) -> None:
    """Nothing: the interpreter has written the number into the pipe already."""
