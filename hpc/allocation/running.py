"""The step while it runs: waited for without looking again and again, and told what the batch step is told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpc import exitcodes
from hpc.allocation.standby import Listener
from hpc.errors import SlurmCommandError
from hpc.slurm import commands

ANSWER_LIMIT_S = 10.0
AFTER_GRACE_S = 3.0
"""How long after the grace time a step may still take before srun itself is told to end it."""
DISMISSED_S = 30.0
"""How long agents that stood by may take to go."""
LOOK_S = 0.2  # only where the kernel has no pidfd_open


class RunningStep:
    """One srun (or the agent of a local run) that was started.

    srun passes warnings on to its tasks, but takes SIGTERM for an order to kill the step at once (seen with 22.05.8:
    "forcing job termination"). So the tasks of a batch job get theirs by scancel, and keep their grace time.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        *,
        batch_job: str | None,
        grace_s: float,
        on_end: Callable[[], None],
        listener: Listener | None = None,
    ) -> None:
        """`batch_job`: the job whose steps scancel may signal; None where the child itself gets every signal.

        `on_end` is called once SIGTERM has come, outside of the handler, before it is passed on. `listener`: where the
        agents tell that they stand by; the child's standard input is then a pipe.
        """
        self._child, self._batch_job, self._grace_s, self._on_end = child, batch_job, grace_s, on_end
        self._listener = listener
        self.stands_by: int | None = None
        """The exit code of the start whose agents wait for the word to begin another one."""
        self.outcome: Mapping[str, Any] | None = None
        """What these agents have told of it, as outcome.json does where it can be written."""
        self._end_wanted = self._end_sent = self._dismissed = self._slurm_ends = False
        self._force_at = math.inf
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(child.pid)  # Linux 5.3
            self._selector.register(self._pidfd, selectors.EVENT_READ)
        except OSError:
            pass

    def pass_on(self, number: int) -> bool:
        """A signal of the batch step; a signal handler may call this. False when the step has ended."""
        if self._child.poll() is not None:
            return False
        if number == signal.SIGTERM and self._batch_job is not None:
            self._end_wanted = True
            os.write(self._writer, b"\0")
        else:
            self._child.send_signal(number)
        return True

    def ends_within(self, seconds: float) -> bool:
        """Wait at most so long; True when the step has ended, or its agents stand by."""
        deadline = time.monotonic() + seconds
        while self._child.poll() is None:
            if self._listener is not None and (told := self._listener.hear()) is not None and not self._dismissed:
                self.outcome, self.stands_by = told, int(told["code"])
                return True
            if self._end_wanted and not self._end_sent:
                self._end_sent = True
                self._tell_tasks()
            now = time.monotonic()
            if now >= self._force_at:
                self._force_at = math.inf
                self._child.send_signal(signal.SIGTERM)
            if now >= deadline:
                return False
            wait = min(deadline, self._force_at) - now
            self._selector.select(wait if self._pidfd is not None else min(wait, LOOK_S))
            try:
                os.read(self._reader, 4096)
            except BlockingIOError:
                continue
        return True

    def over_within(self, seconds: float) -> None:
        """Slurm ends the job, and has told the tasks itself: tell the agents when their workers have to be gone.

        Where the child's standard input is no pipe, the grace time that they know holds.
        """
        self._slurm_ends = True
        self._tell({"over_in_s": seconds})

    def _tell(self, word: Mapping[str, object]) -> bool:
        """A line for all agents; False: they have gone."""
        if self._child.stdin is None:
            return False
        try:
            self._child.stdin.write(json.dumps(word).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            return False
        return True

    def again(self, told: Mapping[str, str]) -> bool:
        """Tell the agents that stand by to start their workers again, with this in their environment; False: they have gone."""
        if not self._tell({"again": dict(told)}):
            return False
        self.stands_by = self.outcome = None
        self._end_wanted = self._end_sent = False
        self._force_at = math.inf
        return self._child.poll() is None

    def dismiss(self) -> None:
        """Let agents that stand by go; returns when the step has ended."""
        self.stands_by, self._dismissed = None, True
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        if not self.ends_within(DISMISSED_S):
            self._child.send_signal(signal.SIGTERM)  # srun ends the step by force
            self._child.wait()

    def code(self) -> int:
        """The exit code, as a shell would give it, of the child that has ended, or of the start whose agents stand by."""
        return self.stands_by if self.stands_by is not None else exitcodes.from_returncode(self._child.wait())

    def close(self) -> None:
        self._selector.close()
        if self._listener is not None:
            self._listener.close()
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        for descriptor in (self._reader, self._writer, self._pidfd):
            if descriptor is not None:
                os.close(descriptor)

    def _tell_tasks(self) -> None:
        assert self._batch_job is not None
        self._on_end()
        if self._slurm_ends:
            return
        try:
            commands.cancel(self._batch_job, signal_name="TERM", timeout_s=ANSWER_LIMIT_S)
            self._force_at = time.monotonic() + self._grace_s + AFTER_GRACE_S
        except SlurmCommandError:
            self._force_at = 0.0  # Slurm cannot be reached: srun can
