"""Where the ranks of one run meet: ports that are proven free, and a master that can be reached.

Rank zero's agent binds the port itself and holds it from then on; the store's server process inherits the
listening socket. So there is no moment between "seen to be free" and "in use" in which a stranger could take it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from hpc.errors import RendezvousError

FIRST_PORT, LAST_PORT = 10000, 32767  # below Linux's ephemeral range, 32768-60999: ip(7), ip_local_port_range
CANDIDATES = 32
RESOLVE_LIMIT_S = 20.0


def candidate_ports(
    job_id: str, array_index: str | None, attempt: int, secret: str = "", step_id: str = ""
) -> list[int]:
    """The ports that this attempt of this job step tries, in order; every task computes the same list.

    They differ by user, job, array index, step and attempt, and lie outside the ephemeral range. With a secret nobody
    else can foretell them.
    """
    identity = f"{os.geteuid()}:{job_id}:{array_index}:{step_id}:{attempt}:{secret}"
    ports: list[int] = []
    counter = 0
    while len(ports) < CANDIDATES:
        digest = hashlib.sha256(f"{identity}:{counter}".encode()).digest()
        port = FIRST_PORT + int.from_bytes(digest[:4], "big") % (LAST_PORT - FIRST_PORT + 1)
        if port not in ports:
            ports.append(port)
        counter += 1
    return ports


def ephemeral_range() -> tuple[int, int]:
    """The first and last port that the kernel hands out by itself. Source: ip(7), ip_local_port_range."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


def listen(address: str, ports: Sequence[int], backlog: int = 4096) -> socket.socket:
    """A listening socket on the first of `ports` that is free here and outside this node's ephemeral range.

    Raises:
        RendezvousError: every port is taken, or the address is not one of this node's.
    """
    low, high = ephemeral_range()
    preferred = [port for port in ports if not low <= port <= high] or list(ports)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reason = "no port to try"
    for port in preferred:
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, port))
            server.listen(backlog)
        except OSError as error:
            server.close()
            reason = f"{error.strerror} ({port})"
            continue
        return server
    tried = str(preferred[0]) if len(preferred) == 1 else f"{len(preferred)} ports"
    raise RendezvousError(
        f"no port for the rendezvous on {socket.gethostname()} ({address}): {tried} tried, the last: {reason}; "
        f"set MASTER_PORT to a free one, or unset it"
    )


def resolve(name: str, limit_s: float = RESOLVE_LIMIT_S) -> str:
    """The numeric address of a host, within `limit_s` seconds; a number is used as given, never looked up.

    Raises:
        RendezvousError: the name does not resolve, or the look-up takes longer than the limit.
    """
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    found: list[str] = []
    failed: list[str] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(str(answer[4][0]) for answer in sorted(answers, key=lambda a: a[0] != socket.AF_INET))
        except (OSError, UnicodeError) as error:
            failed.append(str(error))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(limit_s)
    if found:
        return next((a for a in found if not ipaddress.ip_address(a).is_loopback), found[0])
    why = failed[0] if failed else f"no answer within {limit_s:.0f} s"
    raise RendezvousError(
        f"on {socket.gethostname()}: cannot resolve the master {name!r} ({why}): "
        f"set MASTER_ADDR to an address that every node can reach, or mend the host names of this cluster"
    )


def master_address(name: str, *, nodes: int, rank: int, allow_loopback: bool = False) -> str:
    """The numeric address of the master, checked before any wait.

    Raises:
        RendezvousError: it does not resolve, or is a loopback address although there are several nodes.
    """
    try:
        address = resolve(name)
    except RendezvousError as error:
        raise RendezvousError(f"rank {rank} {error}") from None
    if nodes > 1 and ipaddress.ip_address(address).is_loopback and not allow_loopback:
        shown = name if name == address else f"{name} ({address})"
        raise RendezvousError(
            f"rank {rank} on {socket.gethostname()}: the master {shown} is a loopback address, which the other nodes of "
            f"{nodes} cannot reach: set MASTER_ADDR to its address on the cluster's network (and GLOO_SOCKET_IFNAME / "
            f"NCCL_SOCKET_IFNAME to that interface), or mend the line of {name} in /etc/hosts"
        )
    return address


def interface_of(address: str) -> str | None:
    """The network interface of this node that has the numeric address, or None."""
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return interface
    return None


def socket_interface(peer: str, note: Callable[[str], None]) -> dict[str, str]:
    """Variables that keep Gloo off the loopback interface when this node's own name resolves to it.

    Gloo advertises the address that the host name resolves to, and the other nodes then connect to themselves. Empty
    when the name is fine or the user chose an interface. `peer` is a numeric address of another node or of the master.
    Source: PyTorch documentation, torch.distributed, "Choosing the network interface to use".
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return {}
    own = socket.gethostname()
    try:
        address = resolve(own, 5.0)
        if not ipaddress.ip_address(address).is_loopback:
            return {}
    except RendezvousError:
        address = "nothing"
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # sends nothing: the kernel only chooses the route
            interface = interface_of(str(probe.getsockname()[0]))
        except OSError:
            interface = None
    if interface is None:
        note(
            f"the host name {own} resolves to {address}: set GLOO_SOCKET_IFNAME to the interface of the cluster's network"
        )
        return {}
    note(
        f"the host name {own} resolves to {address}, so GLOO_SOCKET_IFNAME={interface} is set for the workers "
        f"(the way to {peer}); set it yourself to choose another"
    )
    return {"GLOO_SOCKET_IFNAME": interface}
