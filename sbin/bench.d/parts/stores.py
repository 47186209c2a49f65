"""Simulated ranks that meet at one real store: few client processes, many TCPStore clients in each.

    python stores.py turns RANKS ROUNDS   {"ours": [seconds, ...], "bare": [...]}
    python stores.py alone COUNT          our store, and that many clients in this process, for strace

A rank's rendezvous: connect, join (count up one key), and wait for the key that the last one sets.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from torch.distributed import TCPStore

from hpc.node import rendezvous, store

PROCESSES = 4


def turns(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from letting the clients go to the last one's release, of both kinds of store in turn."""
    found: dict[str, list[float]] = {"ours": [], "bare": []}
    for turn in range(rounds + 1):
        for kind in list(found)[:: 1 if turn % 2 == 0 else -1]:
            reader, writer = os.pipe()
            server = os.fork()
            if server == 0:
                try:
                    serve(kind, writer)
                finally:
                    os._exit(1)
            os.close(writer)
            host, port = os.read(reader, 100).decode().split()
            os.close(reader)
            try:
                seconds = meet(host, int(port), ranks, PROCESSES)
            finally:
                os.kill(server, signal.SIGKILL)
                os.waitpid(server, 0)
            if turn:  # the first turn warms up
                found[kind].append(seconds)
    return found


def serve(kind: str, tell: int) -> None:
    """`bare` is the store as torch makes it for rank zero; `ours` the server of hpc.node on the agent's socket."""
    if kind == "ours":
        server = rendezvous.listen("127.0.0.1", rendezvous.candidate_ports(str(os.getpid()), None, 0))
        host, port = server.getsockname()
        os.write(tell, f"{host} {port}".encode())
        store.serve(server.detach(), host, port)
    kept = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, f"127.0.0.1 {kept.port}".encode())
    while True:
        signal.pause()


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
    for client in stores:
        if client.add("joined", 1) == ranks:
            client.set("go", "1")
    for client in stores:
        client.wait(["go"])


def alone(count: int) -> None:
    """Our store in a child and `count` clients in this process, which a tracer follows."""
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            serve("ours", writer)
        finally:
            os._exit(1)
    host, port = os.read(reader, 100).decode().split()
    try:
        _clients(host, int(port), count, count)
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


if __name__ == "__main__":
    if sys.argv[1] == "turns":
        print(json.dumps(turns(int(sys.argv[2]), int(sys.argv[3]))))
    else:
        alone(int(sys.argv[2]))
