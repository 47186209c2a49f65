"""The controller's side of a step that stays: its agents wait, torch imported, for the word to start their workers again.

Rank zero's agent tells how a start has ended, through a socket in Linux's abstract namespace: nothing of it lies in a file
system, and only this user is heard. The word goes to all agents at once by srun's standard input.
Source: unix(7), "Abstract sockets" and SO_PEERCRED; srun(1), --input.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from typing import Any

from hpc.allocation.allocation import Allocation
from hpc.errors import NodelistError
from hpc.slurm.nodelist import first_host

READ_S = 1.0
_LIMIT = 4 << 20  # of bytes in one report: tracebacks are in it


def is_with_rank_zero(allocation: Allocation, node: str | None) -> bool:
    """Whether this process (on `node`, None outside of Slurm's nodes) is where rank zero's agent will be."""
    if not allocation.job_id:
        return True
    try:
        return node is not None and first_host(allocation.node_list) == node
    except NodelistError:
        return False


class Listener:
    """Hears from rank zero's agent that a start of the step has ended, while the step itself goes on."""

    def __init__(self) -> None:
        self.name = f"hpc-{secrets.token_hex(16)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.setblocking(False)
        self._server.bind(f"\0{self.name}")
        self._server.listen(4)

    def fileno(self) -> int:
        return self._server.fileno()

    def hear(self) -> dict[str, Any] | None:
        """The outcome of a start whose agents stand by now; None when nobody, or somebody else, has called."""
        outcome = None
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return outcome
            with caller, contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                caller.settimeout(READ_S)
                _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if user == os.getuid():
                    outcome = _read(caller)
                    caller.sendall(b"\n")

    def close(self) -> None:
        self._server.close()


def _read(caller: socket.socket) -> dict[str, Any]:
    with caller.makefile("rb") as stream:
        told = json.loads(stream.readline(_LIMIT))
    return {**told, "code": int(told["code"])}
