"""Notices: the signals that ask this process to stop. Handlers only take a note; what follows is hpc.train.stop's.

SIGTERM, the warning signal of slurm.signal and the first Ctrl-C are notices, in any order and number. The interpreter
writes each signal's number into a pipe at once (Python's documentation, signal.set_wakeup_fd), so a thread hears it
even while the main thread is stuck in a collective. Nothing here needs torch: a notice counts from the first import on.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from hpc.schema import LaunchConfig, SlurmConfig
from hpc.train import limit

log = logging.getLogger("hpc.train")

EARLY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What is listened to before the configuration is known."""
MARGIN = 0.9
"""The share of the time given that is used before this process leaves by itself: the agent's SIGKILL comes after all of it."""
_CONFIRMED = 0x80  # set in a byte that a handler wrote, should another library have taken the wake-up descriptor

_listening: Notices | None = None


def listen() -> Notices:
    """Take note of signals from now on, in this process; the main thread calls this. A second call changes nothing."""
    global _listening
    if _listening is None:
        _listening = Notices()
        os.register_at_fork(after_in_child=_forget)
    return _listening


def _forget() -> None:
    """In a forked child: signals are no longer the rank's, and a note must not land in the rank's pipe."""
    global _listening
    if _listening is not None:
        _listening.let_go()
        _listening = None


class Notices:
    """The notices that this process has heard.

    A hard deadline begins with the first one: a process that has not come to its agreed stop by then leaves at once
    with 143, stuck in a collective or not. After SIGTERM and Ctrl-C it is launch.grace_s, since the agent's SIGKILL
    follows; after the warning signal slurm.signal_lead_s if that is longer, since Slurm ends the job only then. Once the
    stop has come there is no deadline: collectives are bounded by train.timeout_s, and a save is not cut short here.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        """The name of the first notice, as "SIGTERM"."""
        self.on_notice: Callable[[], None] | None = None
        """Called in the listening thread at each notice."""
        self._signals = frozenset(EARLY)
        self._warning: signal.Signals = signal.Signals[f"SIG{SlurmConfig().signal}"]
        self._grace_s, self._lead_s = LaunchConfig().grace_s, float(SlurmConfig().signal_lead_s)
        self._deadline = math.inf
        self._settled = False
        self._interrupts = 0
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        self._before = {number: signal.signal(number, self._confirm) for number in EARLY}
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the agent has held them back up to here
        threading.Thread(target=self._hear, name="notices", daemon=True).start()

    def configure(self, slurm: SlurmConfig, launch: LaunchConfig) -> None:
        """From now on as configured; what was noted before and is no notice is forgotten. The main thread calls this."""
        warning = signal.Signals[f"SIG{slurm.signal}"]
        wanted = frozenset((signal.SIGTERM, signal.SIGINT, warning))
        for number in wanted - self._signals:
            signal.signal(number, self._confirm)
        for number in self._signals - wanted:
            before = self._before.get(number) or signal.SIG_DFL
            # a stray warning of another kind must not end the run
            signal.signal(number, signal.SIG_IGN if before == signal.SIG_DFL else before)
        with self._lock:
            self._signals, self._warning = wanted, warning
            self._grace_s, self._lead_s = launch.grace_s, float(slurm.signal_lead_s)
            if self.first is not None and self.first not in {number.name for number in wanted}:
                self.first, self._deadline = None, math.inf

    def learn(self, name: str) -> None:
        """Another rank has heard a notice: the deadline holds here too."""
        if name != limit.NOTICE:
            with self._lock:
                self._begin_deadline(signal.Signals[name])
            self._wake()

    def time_is_up(self) -> None:
        """The run's own notice: what is left of the allocation is needed for the save. SIGTERM sets a deadline if it must."""
        with self._lock:
            if self.first is not None:
                return
            self.first = limit.NOTICE
        log.info("notice (%s): the time limit is near, stopping after the step under way", limit.NOTICE)
        if self.on_notice is not None:
            self.on_notice()

    def settle(self) -> None:
        """The agreed stop has come, or the run has ended: there is no deadline any more."""
        with self._lock:
            self._settled, self._deadline = True, math.inf

    def let_go(self) -> None:
        """In a forked child, undo all of it: terminating it works again, and a warning does not kill it."""
        signal.set_wakeup_fd(-1)
        usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        for number in self._signals:
            if signal.getsignal(number) == self._confirm:
                signal.signal(number, usual.get(number, signal.SIG_IGN))
        os.close(self._reader)
        os.close(self._writer)

    def _confirm(self, number: int, frame: FrameType | None) -> None:
        """The handler. The interpreter has written the number already, unless the wake-up descriptor is another's."""
        try:
            os.write(self._writer, bytes([number | _CONFIRMED]))
        except BlockingIOError:
            return  # the pipe is full of notes

    def _wake(self) -> None:
        """Have the listening thread look at the deadline anew."""
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return

    def _hear(self) -> None:
        while True:
            left = self._deadline - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], None if left == math.inf else max(0.0, left))
            if not ready and time.monotonic() >= self._deadline:
                self._leave()
            elif ready:
                for byte in os.read(self._reader, 4096):
                    if byte:
                        self._note(byte & ~_CONFIRMED, confirmed=bool(byte & _CONFIRMED))

    def _note(self, number: int, *, confirmed: bool) -> None:
        with self._lock:
            if number not in self._signals:
                return
            name = signal.Signals(number).name
            if number == signal.SIGINT and not confirmed:
                self._interrupts += 1
                if self._interrupts > 1:  # asked twice at the keyboard
                    _exit("interrupted twice: leaving without a checkpoint", signal.SIGINT)
            is_first, self.first = self.first is None, self.first or name
            self._begin_deadline(signal.Signals(number))
        if is_first:
            more = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            log.info("notice (%s): stopping after the step under way%s", name, more)
        if self.on_notice is not None:
            self.on_notice()

    def _begin_deadline(self, number: signal.Signals) -> None:
        if not self._settled:
            only_a_warning = number == self._warning and number not in (signal.SIGTERM, signal.SIGINT)
            seconds = max(self._lead_s, self._grace_s) if only_a_warning else self._grace_s
            self._deadline = min(self._deadline, time.monotonic() + MARGIN * seconds)

    def _leave(self) -> None:
        with self._lock:
            if not self._settled:
                _exit("no agreed stop in the time that was left: leaving without a new checkpoint", signal.SIGTERM)


def _exit(text: str, number: signal.Signals) -> None:
    """End this process here and now, whatever its other threads are doing."""
    shown = "\x1b[?25h" if os.environ.get("HPC_TERMINAL") == "1" or sys.stdout.isatty() else ""  # the cursor again
    os.write(2, f"{shown}hpc.train: rank {os.environ.get('RANK', '0')}: {text}\n".encode())
    os._exit(128 + number)
