"""How the agents of one job step meet, agree, and hear of each other's failures.

Rank zero's agent is the host: it listens on the first free of the job's candidate ports. Every other agent is a
guest: it tries the same ports until one greets it with the job's own greeting and knows the job's key. Each side
proves the key before anything is told (HMAC over the other's random challenge). Then one line of JSON per message:

    guest -> host   {"joined": {...}}   {"ended": {...}}
    host -> guest   {"go": {...}}       {"stop": {...}}      {"over": {}}

One connection per agent, held for the whole step: a connection that breaks tells of a node that is gone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpc.errors import RendezvousError

GREETING = "hpc-meeting-1"
MESSAGE_LIMIT = 256 * 1024
STRANGER_LIMIT = 16 * 1024
"""Bytes that are read of one who has not proven the key."""
STRANGERS = 256
"""Connections without proof that the host keeps besides one per task; of more, the oldest ones are closed."""
SPARE_FILES = 512
"""Open files of an agent besides these connections: of its workers, of what is imported meanwhile."""
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Connection:
    """One end of a meeting: whole JSON lines in and out, without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.proven = False
        self.challenge = secrets.token_hex(16)
        self.task: int | None = None
        self.silent = False
        """The other end did not close it: its whole node does not answer any more."""
        self._incoming = b""
        self._outgoing = b""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A peer whose node lost its power or its cable is noticed after 10 + 3 x 5 s: tcp(7)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            # and as soon when something was on its way to it, which otherwise is sent again for a quarter of an hour
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def events(self) -> int:
        """What a selector has to watch it for; when it is ready, `receive` also sends what is queued."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)

    def send(self, **message: Any) -> None:
        """Queue one message and send what can be sent now; a broken connection shows at the next `receive`."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what is queued; True when nothing is left."""
        while self._outgoing:
            try:
                sent = self.sock.send(self._outgoing)
            except BlockingIOError:
                return False
            except OSError:
                self._outgoing = b""
                break
            self._outgoing = self._outgoing[sent:]
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The whole messages that have come, and whether the other end is gone (or talks nonsense)."""
        gone = False
        self.flush()
        while True:
            try:
                data = self.sock.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:
                self.silent = error.errno in _SILENCE
                data = b""
            if not data:
                gone = True
                break
            self._incoming += data
            if len(self._incoming) > (MESSAGE_LIMIT if self.proven else STRANGER_LIMIT):
                # of one who has proven the key only a single message can be too long: several may have come at once
                if not self.proven or len(self._incoming) - self._incoming.rfind(b"\n") > MESSAGE_LIMIT:
                    return [], True
        *lines, self._incoming = self._incoming.split(b"\n")
        messages: list[dict[str, Any]] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                return messages, True
            if not isinstance(message, dict):
                return messages, True
            messages.append(message)
        return messages, gone

    def close(self) -> None:
        self.sock.close()


def proof(key: bytes, challenge: str, side: str) -> str:
    """What only a holder of the key can answer to a challenge; `side` keeps an answer from being played back."""
    text = f"{GREETING}:{side}:{challenge}".encode("utf-8", "backslashreplace")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _is_proof(answer: Any, key: bytes, challenge: str, side: str) -> bool:
    """Whether the answer, whatever a stranger may have sent as such, is the right one."""
    given = answer.encode("utf-8", "backslashreplace") if isinstance(answer, str) else b""
    return hmac.compare_digest(given, proof(key, challenge, side).encode())


def _challenge(message: Mapping[str, Any]) -> str:
    challenge = message.get("challenge")
    return challenge if isinstance(challenge, str) else ""


class Host:
    """Rank zero's side: collects the guests, tells them to go, hears how they end."""

    def __init__(self, server: socket.socket, key: bytes, tasks: int) -> None:
        self.server = server
        self.tasks = tasks
        self.joined: dict[int, dict[str, Any]] = {}
        self.connections: dict[int, Connection] = {}
        self._key = key
        self._strangers: dict[Connection, None] = {}  # in the order in which they came
        server.setblocking(False)
        allow_open_files(tasks + STRANGERS + SPARE_FILES)

    def sockets(self) -> list[socket.socket | Connection]:
        """What a selector has to watch."""
        return [self.server, *self._strangers, *self.connections.values()]

    def join_self(self, task: int, facts: Mapping[str, Any]) -> None:
        """The host's own task takes part like any other."""
        self.joined[task] = dict(facts)

    def missing(self) -> list[int]:
        return [task for task in range(self.tasks) if task not in self.joined]

    def accept(self) -> None:
        """Greet whoever has connected; nothing is told before the key is proven."""
        while True:
            try:
                sock, _ = self.server.accept()
            except (BlockingIOError, OSError):
                return
            try:
                connection = Connection(sock)
            except OSError:  # it has gone again
                sock.close()
                continue
            self._strangers[connection] = None
            connection.send(greeting=GREETING, challenge=connection.challenge)
            if len(self._strangers) > self.tasks + STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()

    def serve(self, connection: Connection) -> list[tuple[int, dict[str, Any]]]:
        """Read one connection: messages of proven guests as (task, message); a broken one gives (task, {"gone": ...})."""
        messages, gone = connection.receive()
        news: list[tuple[int, dict[str, Any]]] = []
        for message in messages:
            if connection.task is not None:
                news.append((connection.task, message))
            elif not self._admit(connection, message):
                gone = True
                break
            elif connection.task is not None:
                news.append((connection.task, message))
        if gone:
            self._strangers.pop(connection, None)
            if connection.task is not None and self.connections.pop(connection.task, None) is not None:
                news.append((connection.task, {"gone": True, "silent": connection.silent}))
            connection.close()
        return news

    def _admit(self, connection: Connection, message: Mapping[str, Any]) -> bool:
        if not connection.proven:
            if not _is_proof(message.get("proof"), self._key, connection.challenge, "guest"):
                return False
            connection.proven = True
            connection.send(proof=proof(self._key, _challenge(message), "host"))
            return True
        facts = message.get("joined")
        task = facts.get("task") if isinstance(facts, dict) else None
        if not isinstance(facts, dict) or not isinstance(task, int):
            return False
        if not 0 <= task < self.tasks or task in self.joined:
            connection.send(stop={"code": 78, "message": f"task {task} joined twice, or is none of {self.tasks}"})
            return False
        connection.task = task
        self._strangers.pop(connection, None)
        self.connections[task] = connection
        self.joined[task] = dict(facts)
        return True

    def broadcast(self, **message: Any) -> None:
        for connection in self.connections.values():
            connection.send(**message)

    def flush(self, limit_s: float) -> None:
        """Send what is still queued, for at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not all([connection.flush() for connection in self.connections.values()]):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def close(self) -> None:
        for connection in (*self._strangers, *self.connections.values()):
            connection.close()
        self.server.close()


def allow_open_files(count: int) -> None:
    """Have this process, and what it starts, open so many files, as far as the hard limit goes.

    The usual soft limit of 1024 is less than the agents of a large step. Source: getrlimit(2), RLIMIT_NOFILE.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def find_host(address: str, ports: Sequence[int], key: bytes, deadline: float) -> Connection:
    """Try the job's ports on the master in turn until one proves to be this job's meeting; the guest's side.

    `deadline` is in time.monotonic's seconds. A stranger that holds one of the ports is passed by: all connections
    that stand are kept open, since the host may still be importing and answer late.

    Raises:
        RendezvousError: no port of the master proved to be this job's meeting before the deadline.
    """
    selector = selectors.DefaultSelector()
    trying: dict[int, Connection] = {}
    refused: set[int] = set()
    last_error = "no answer"
    next_round, rounds = 0.0, 0
    try:
        while time.monotonic() < deadline:
            if time.monotonic() >= next_round:
                # the host nearly always gets its first port: the others are tried bit by bit, for the sake of its node
                for port in ports[: 2 + 2 * rounds]:
                    if port not in trying and port not in refused:
                        _start(address, port, trying, selector)
                rounds += 1
                next_round = time.monotonic() + (0.2 if rounds < 20 else 1.0)
            for key_event, _ in selector.select(max(0.0, min(next_round, deadline) - time.monotonic())):
                port, connection = key_event.data, trying[key_event.data]
                verdict = _greet(connection, key)
                if verdict == "host":
                    selector.unregister(connection)
                    del trying[port]
                    return connection
                if verdict != "wait":
                    last_error = verdict
                    selector.unregister(connection)
                    connection.close()
                    del trying[port]
                    if verdict.startswith("stranger"):
                        refused.add(port)
    finally:
        for connection in trying.values():
            connection.close()
        selector.close()
    raise RendezvousError(f"the master {address} was not reached ({last_error}; ports {ports[0]}, {ports[1]}, ...)")


def _start(address: str, port: int, trying: dict[int, Connection], selector: selectors.BaseSelector) -> None:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    connection = Connection(sock)
    try:
        sock.connect((address, port))
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        return
    trying[port] = connection
    selector.register(connection, selectors.EVENT_READ, port)


def _greet(connection: Connection, key: bytes) -> str:
    """One step of the guest's handshake: "host" when proven, "wait" for more, else why this is not the host."""
    error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return f"connection failed, errno {error}"
    messages, gone = connection.receive()
    for message in messages:
        if message.get("greeting") == GREETING and not connection.proven:
            connection.proven = True
            answer = proof(key, _challenge(message), "guest")
            connection.send(proof=answer, challenge=connection.challenge)
        elif connection.proven and "proof" in message:
            mine = _is_proof(message["proof"], key, connection.challenge, "host")
            return "host" if mine else "stranger with another key"
        else:
            return "stranger on the port"
    if gone:
        return "another job's meeting" if connection.proven else "connection closed"
    return "wait"
