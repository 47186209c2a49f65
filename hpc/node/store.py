"""The rendezvous store of one run: a process of its own that serves torch's TCPStore on a socket it was given.

The workers are clients of it (TORCHELASTIC_USE_AGENT_STORE, as under torchrun), so that the port is held by the
agent from the moment it was found free, and the store outlives rank zero's worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from hpc.node.meeting import allow_open_files

OPEN_FILES = 1 << 20
"""As many as may be: each rank has two connections or more."""


def serve(descriptor: int, host: str, port: int) -> None:
    """Serve the store on a bound socket until this process is ended. Imports torch if nobody has."""
    import torch.distributed as dist

    allow_open_files(OPEN_FILES)
    _ask_no_name_server()
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    while store is not None:
        signal.pause()


def _ask_no_name_server() -> None:
    """From here on this process finds host names in /etc/hosts alone.

    TCPStore looks up the name of every client that connects, for a line of its log, in the one thread that serves all
    of them: a name server that is slow or gone would make every rank wait seconds for each rank. Source:
    __nss_configure_lookup, nss.h of the GNU C library; without that library nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), "__nss_configure_lookup")(b"hosts", b"files")


if __name__ == "__main__":
    from hpc.node.worker import die_with_parent

    die_with_parent(os.getppid())
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
