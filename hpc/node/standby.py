"""The agent's side of a step that stays: torch is imported here, so that the next start of the workers is only a fork.

The controller gives its word by srun's standard input, and ends the waiting by closing it: hpc/allocation/standby.py.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from hpc.rundir import STANDBY_VARIABLE

ANSWER_S = 5.0
WAIT_S = 120.0
"""How long the controller's word may take: its pauses are shorter, and where slurmd was killed nobody closes this end."""


class Standby:
    """This agent's ear for the controller; workers get an empty standard input."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = b""
        self._descriptor = os.dup(0)  # not inherited by another program
        self.is_open = True
        """Whether there is somebody at the other end."""
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    @classmethod
    def wanted(cls) -> Standby | None:
        """Where the controller has asked for it; the variable is taken out of the environment."""
        name = os.environ.pop(STANDBY_VARIABLE, "")
        return cls(name) if name else None

    def report(self, outcome: Mapping[str, Any]) -> bool:
        """Rank zero's agent: tell the controller how the start has ended, as outcome.json does where it can be written.

        False when the controller is not on this machine.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(ANSWER_S)
                sock.connect(f"\0{self._name}")
                sock.sendall(json.dumps(outcome).encode() + b"\n")
                return sock.recv(1) == b"\n"
        except OSError:
            return False

    def is_deserted(self) -> bool:
        """Rank zero's agent: whether the controller that it was started by is dead."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(ANSWER_S)
                sock.connect(f"\0{self._name}")
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def fileno(self) -> int:
        return self._descriptor

    def hear(self) -> float | None:
        """While workers run, when something has come: in how many seconds they have to be gone, since Slurm ends the job.

        None when it is something else.
        """
        data = os.read(self._descriptor, 65536)
        self.is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                return float(json.loads(line)["over_in_s"])
            except (ValueError, TypeError, KeyError):
                continue
        return None

    def word(self) -> dict[str, str] | None:
        """Wait for what the next start's environment is to have anew; None when there is to be none."""
        deadline = time.monotonic() + WAIT_S
        while b"\n" not in self._rest:
            if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self._descriptor, 65536)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            again = json.loads(line)["again"]
            return {str(name): str(value) for name, value in again.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def close(self) -> None:
        """In a forked worker."""
        os.close(self._descriptor)
