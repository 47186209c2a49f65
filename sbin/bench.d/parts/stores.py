"""Simulated ranks that meet at one real store: few client processes, many TCPStore clients in each.

    python stores.py serve ours|bare         prints "HOST PORT", serves until its standard input ends
    python stores.py meet HOST PORT RANKS PROCESSES   prints the seconds from the first connect to the last one's release
    python stores.py ranks HOST PORT COUNT   that many clients in this process, for strace

A rank's rendezvous: connect, join (count up one key), and wait for the key that the last one sets.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from torch.distributed import TCPStore


def serve(kind: str) -> None:
    """`bare` is the store as torch makes it for rank zero; `ours` the server of hpc.node on the agent's socket."""
    threading.Thread(target=_leave_with_the_caller, daemon=True).start()
    if kind == "ours":
        from hpc.node import rendezvous, store

        server = rendezvous.listen("127.0.0.1", rendezvous.candidate_ports(str(os.getpid()), None, 0))
        host, port = server.getsockname()
        print(host, port, flush=True)
        store.serve(server.detach(), host, port)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        kept = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        print("127.0.0.1", port, flush=True)
        while kept is not None:
            signal.pause()


def _leave_with_the_caller() -> None:
    sys.stdin.read()
    os._exit(0)


def meet(host: str, port: int, ranks: int, processes: int) -> float:
    """Fork the client processes; they are let go together."""
    ready, go = os.pipe(), os.pipe()
    children = []
    for _ in range(processes):
        pid = os.fork()
        if pid == 0:
            os.close(go[1])
            os.write(ready[1], b"x")
            os.read(go[0], 1)  # ends when the parent closes its end
            status = 1
            try:
                _clients(host, port, ranks // processes, ranks)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    for _ in children:
        os.read(ready[0], 1)
    begun = time.perf_counter()
    os.close(go[1])
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    ended = time.perf_counter()
    if any(statuses):
        raise SystemExit("a client process failed")
    return ended - begun


def _clients(host: str, port: int, count: int, ranks: int) -> None:
    stores = [TCPStore(host, port, is_master=False) for _ in range(count)]
    for store in stores:
        if store.add("joined", 1) == ranks:
            store.set("go", "1")
    for store in stores:
        store.wait(["go"])


if __name__ == "__main__":
    action, words = sys.argv[1], sys.argv[2:]
    if action == "serve":
        serve(words[0])
    elif action == "meet":
        print(meet(words[0], int(words[1]), int(words[2]), int(words[3])))
    else:
        _clients(words[0], int(words[1]), int(words[2]), int(words[2]))
