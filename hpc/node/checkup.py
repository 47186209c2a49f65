"""One node's part of a check of the allocation: `python -m hpc.node.checkup`, one task per node, without torch.

It tells what it finds on stdout (hpc/lines.py), and hears on stdin what the others have told: the controller
(hpc/allocation/checkup.py) stands between, so that nothing is needed to meet but Slurm itself.

    task -> controller   hello (this node alone)   reach (the others' names, ports, clocks)   wrote   read   (one line each)
    controller -> tasks  {"peers": {node: port}}                                              {"read": [node, ...]}
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpc.errors import RendezvousError
from hpc.lines import pieces
from hpc.node import gpuhealth
from hpc.node.meeting import proof
from hpc.node.rendezvous import resolve
from hpc.rundir import SECRET_VARIABLE

RESOLVE_S = 5.0
CONNECT_S = 5.0
SEEN_S = 5.0
"""How long a file that another node has written may take to show."""
WRITTEN_BYTES = 8 << 20
AT_ONCE = 32
MANY = 64
"""Every node calls every other one up to so many; beyond, only so many of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Look, tell and leave; ended by SIGALRM when it takes longer than --limit."""
    parser = argparse.ArgumentParser(prog="python -m hpc.node.checkup", description="One node's part of a check.")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--limit", type=float, required=True, metavar="S", help="the most seconds that this may take")
    asked = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, asked.limit)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    key = os.environ.get(SECRET_VARIABLE, "").encode()
    listener = Listener(key)
    tell("hello", node, port=listener.port, **this_node(asked.folder))
    said = hear()
    if "peers" not in said:
        return 1  # the controller has let go of this task
    peers = said["peers"]
    tell("reach", node, reach=reach_all({peer: peers[peer] for peer in next_to(node, list(peers))}, key))
    tell("wrote", node, **write(asked.folder, node))
    tell("read", node, seen=see_all(asked.folder, next_to(node, hear().get("read", []))))
    hear()  # until the controller has heard of all
    return 0


def tell(kind: str, node: str, **facts: Any) -> None:
    """One message to the controller."""
    sys.stdout.flush()
    data = pieces(node, {"kind": kind, "node": node, **facts})
    while data:
        data = data[os.write(1, data) :]


def hear() -> dict[str, Any]:
    """The next line of the controller; {} when it has gone."""
    try:
        said = json.loads(sys.stdin.readline() or "{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


# ---- this node alone -------------------------------------------------------------------------------------------------


def this_node(folder: Path) -> dict[str, Any]:
    """What can be told without the others: GPUs, room, its own name."""
    gpus, why_not = gpuhealth.ask()
    host = socket.gethostname()
    try:
        address = resolve(host, RESOLVE_S)
        loopback = ipaddress.ip_address(address).is_loopback
    except RendezvousError:
        address, loopback = "", False
    return {
        "host": host,
        "address": address,
        "loopback": loopback,
        "gpus": gpus,
        "gpus_unknown": why_not,
        "gpus_given": _given(os.environ),
        "shm_free": free(Path("/dev/shm")),
        "tmp_free": free(Path(tempfile.gettempdir())),
        "folder_free": free(folder),
        "folder_there": folder.is_dir(),
    }


def _given(environ: Mapping[str, str]) -> int | None:
    """GPUs that Slurm has given to this task; None when it says nothing of them."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else len([name for name in listed.split(",") if name not in ("", "-1", "NoDevFiles")])


def free(path: Path) -> int | None:
    """Bytes that a user may still write there; None where there is no such place."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


# ---- the others ------------------------------------------------------------------------------------------------------


class Listener:
    """Answers whoever proves the key with the time of this node's clock, as long as this process lives."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=family != socket.AF_INET
        )
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while True:
                connection, _ = self._server.accept()
                pool.submit(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(CONNECT_S)
            challenge = secrets.token_hex(16)
            try:
                connection.sendall(f"{challenge}\n".encode())
                answer = connection.recv(256).decode("ascii", "replace").strip()
                if self._key and hmac.compare_digest(answer.encode(), proof(self._key, challenge, "guest").encode()):
                    connection.sendall(f"{time.time()!r}\n".encode())
            except OSError:
                return  # the other end tells of it


def next_to(node: str, nodes: Sequence[str]) -> list[str]:
    """All the others; of very many those that follow it, around the end, so that the work of all grows with their number."""
    others = [name for name in nodes if name != node]
    if len(others) <= MANY:
        return others
    start = sum(name < node for name in others)
    return (sorted(others) * 2)[start : start + MANY]


def reach_all(peers: Mapping[str, int], key: bytes) -> dict[str, dict[str, Any]]:
    """What came of a call to each of these nodes."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(peers, pool.map(lambda name: reach(name, peers[name], key), peers), strict=True))


def reach(name: str, port: int, key: bytes) -> dict[str, Any]:
    """Call a node by its name: {"address", "ms", "ahead_s"}, the last being how far its clock is ahead; or {"error"}."""
    try:
        address = resolve(name, RESOLVE_S)
    except RendezvousError:
        return {"error": f"the name {name} does not resolve"}
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            took = time.monotonic() - began
            challenge = _line(connection)
            asked = time.time()
            connection.sendall(f"{proof(key, challenge, 'guest')}\n".encode())
            there = float(_line(connection))
            ahead = there - (asked + time.time()) / 2
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or "no answer"
        return {"address": address, "error": f"{address}, port {port}: {words}"}
    return {"address": address, "ms": round(took * 1000, 2), "ahead_s": round(ahead, 4)}


def _line(connection: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(256)
        if not more or len(data) > 1024:
            raise ValueError("it is no part of this check")
        data += more
    return data.decode("ascii").strip()


# ---- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, node: str) -> dict[str, Any]:
    """Write this node's file: {"mib_per_s"}, the sync counted; or {"error"}."""
    data = _content(node) + os.urandom(WRITTEN_BYTES)
    began = time.monotonic()
    try:
        descriptor = os.open(folder / _file_name(node), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
    except OSError as error:
        return {"error": f"{folder}: {error.strerror or error}"}
    return {"mib_per_s": round(len(data) / (1 << 20) / max(1e-6, time.monotonic() - began), 1)}


def see_all(folder: Path, nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each of the others: how long its file took to show here, as {"s"}; or {"error"}."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(nodes, pool.map(lambda node: see(folder, node), nodes), strict=True))


def see(folder: Path, node: str, *, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """Wait for one file of another node, at most SEEN_S seconds."""
    began = time.monotonic()
    wanted, said = _content(node), "it does not show"
    while True:
        try:
            with open(folder / _file_name(node), "rb") as stream:
                if stream.read(len(wanted)) == wanted and stream.seek(0, os.SEEK_END) == len(wanted) + WRITTEN_BYTES:
                    return {"s": round(time.monotonic() - began, 3)}
            said = "its content is not whole"
        except OSError as error:
            said = error.strerror or str(error)
        if time.monotonic() - began > SEEN_S:
            return {"error": f"the file of {node}: {said}, {SEEN_S:g} s after it was written"}
        sleep(0.05)


def _file_name(node: str) -> str:
    return f"from-{node.replace('/', '_')}"


def _content(node: str) -> bytes:
    return f"written by {node}\n".encode()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads may still wait for a name or a peer
