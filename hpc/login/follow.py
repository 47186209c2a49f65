"""Follow a job from the login node: its output as it grows, its state when it changes, its exit code at the end."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpc import exitcodes
from hpc.errors import SlurmCommandError, printable
from hpc.slurm import commands
from hpc.slurm.states import JobState, parse_state

READ_EVERY_S = 0.5
ASK_EVERY_S = 2.0
ASK_CALMLY_EVERY_S = 10.0
CALM_AFTER_S = 60.0
"""Without a new state for so long Slurm's controller, which all users share, is asked less often."""
COME_BACK_S = 20.0
"""How long a preempted job, or one whose node failed, is watched for its return to the queue."""
UNKNOWN_LIMIT = 5
"""Answers "no such job" in a row until a job counts as forgotten by Slurm."""
_CHUNK = 1 << 16


def follow(job_id: str, output: Path, *, tell: Callable[[str], None]) -> int:
    """Print the job's output until the job has ended for good, and return its exit code.

    `tell` gets a line for each change of state. A requeued job is followed on. Ctrl-C, or a reader that has gone
    away, ends the following and not the job (130).
    """
    try:
        return _Follower(job_id, output, tell).run()
    except (KeyboardInterrupt, BrokenPipeError):
        tell(f"no longer following; job {job_id} goes on")
        tell(f"  follow   tail -F {shlex.quote(str(output))}")
        tell(f"  cancel   scancel {job_id}")
        return exitcodes.INTERRUPTED


def exit_code(fields: dict[str, str], state: JobState) -> int:
    """The exit code that a job in its final state stands for: its own, or 128 + signal; never 0 unless it succeeded.

    Source: scontrol(1), "show job", ExitCode (code:signal).
    """
    code_text, _, signal_text = fields.get("ExitCode", "0:0").partition(":")
    code = int(code_text) if code_text.isdecimal() else 0
    number = int(signal_text) if signal_text.isdecimal() else 0
    if code == 0 and number:
        code = 128 + number
    return code if code or state.succeeded else exitcodes.FAILED


class _Follower:
    def __init__(self, job_id: str, output: Path, tell: Callable[[str], None]) -> None:
        self.job_id = job_id
        self.output = output
        self.tell = tell
        self.position = 0
        self.shown = ""
        self.changed = time.monotonic()
        self.fields: dict[str, str] = {}
        self.state: JobState | None = None
        self.unknown = 0
        self.silent = False
        self.ended_since: float | None = None

    def run(self) -> int:
        """Alternate between output and state until the job is over."""
        ask_at = 0.0
        while True:
            grew = self._copy_output()
            if time.monotonic() >= ask_at:
                if self._ask_state():
                    break
                calm = time.monotonic() - self.changed > CALM_AFTER_S
                ask_at = time.monotonic() + (ASK_CALMLY_EVERY_S if calm else ASK_EVERY_S)
            if not grew:
                time.sleep(READ_EVERY_S)
        self._drain()
        return self._verdict()

    def _ask_state(self) -> bool:
        """Ask for the state, tell it if it is new; whether the job is over for good."""
        try:
            fields = commands.show_job(self.job_id)
        except SlurmCommandError as error:
            if not self.silent:
                self.tell(f"cannot ask for the state at the moment: {error}")
                self.silent = True
            return False
        self.silent = False
        if not fields:
            self.unknown += 1
            return self.unknown >= UNKNOWN_LIMIT
        self.unknown = 0
        self.fields, state = fields, parse_state(fields.get("JobState", ""))
        self.state = state
        self._tell_state(state)
        if not state.is_finished:
            self.ended_since = None
            return False
        if not (state.may_come_back and fields.get("Requeue") == "1"):
            return True
        self.ended_since = self.ended_since or time.monotonic()
        return time.monotonic() - self.ended_since > COME_BACK_S

    def _tell_state(self, state: JobState) -> None:
        line = f"job {self.job_id} {state.value}"
        if state.is_pending:
            reason = self.fields.get("Reason", "None")
            line += f", waits for: {reason}" if reason != "None" else ""
        elif state.is_running:
            line += f" on {self.fields.get('NodeList', '?')}"
        if line != self.shown:
            self.shown, self.changed = line, time.monotonic()
            self.tell(printable(line))

    def _copy_output(self) -> bool:
        """Print what is new in the output file; whether there was something."""
        try:
            descriptor = os.open(self.output, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        with open(descriptor, "rb") as stream:
            if os.fstat(descriptor).st_size < self.position:
                self.position = 0
            stream.seek(self.position)
            data = stream.read(_CHUNK)
        self.position += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return bool(data)

    def _drain(self) -> None:
        """The rest of the output, which a shared file system may show late."""
        quiet_until = time.monotonic() + 1.0
        while time.monotonic() < quiet_until:
            if not self._copy_output():
                time.sleep(0.1)

    def _verdict(self) -> int:
        if self.state is None or not self.state.is_finished:
            state = commands.state_of(self.job_id)
            if state is None or not state.is_finished:
                self.tell(f"Slurm has forgotten job {self.job_id}; how it ended is in {printable(str(self.output))}")
                return exitcodes.FAILED
            self.state = state
        code = exit_code(self.fields, self.state)
        how = "" if self.state.succeeded else f", {exitcodes.describe(code)}"
        self.tell(f"job {self.job_id} ended: {self.state.value}{how}")
        return code
