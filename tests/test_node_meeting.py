"""The meeting of the agents: who is let in, who is passed by, and what is told when somebody leaves."""

import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hpc.errors import RendezvousError
from hpc.node import meeting
from hpc.node.meeting import Connection, Host, find_host

KEY = b"the job's own key"
NOISE = (
    b'{"joined": {"task": 1}}\n',
    b'{"proof": "00"}\n',
    '{"proof": "é"}\n'.encode(),
    b'{"proof": "\\ud800", "challenge": "\\ud800"}\n',
    b'{"proof": ["x"], "challenge": {"a": 1}}\n',
    b'{"proof": ' + b"9" * 8000 + b"}\n",
    b'{"proof": null}\n{"joined": {"task": true}}\n',
    b"[" * 8000 + b"\n",
    b"null\n\n\0\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 300_000,
)


@pytest.fixture
def host() -> Iterator[Host]:
    server = socket.create_server(("127.0.0.1", 0))
    host = Host(server, KEY, 3)
    host.join_self(0, {"host": "n1"})
    yield host
    host.close()


def serve(host: Host, seconds: float, news: list[tuple[int, dict[str, object]]]) -> None:
    """Be the host for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            for sock in host.sockets():
                selector.register(sock, selectors.EVENT_READ)
            for key, _ in selector.select(0.05):
                if isinstance(key.fileobj, Connection):
                    news.extend(host.serve(key.fileobj))
                else:
                    host.accept()


def in_background(host: Host, seconds: float = 2.0) -> tuple[threading.Thread, list[tuple[int, dict[str, object]]]]:
    news: list[tuple[int, dict[str, object]]] = []
    thread = threading.Thread(target=serve, args=(host, seconds, news))
    thread.start()
    return thread, news


def port_of(host: Host) -> int:
    return int(host.server.getsockname()[1])


def test_guests_join_and_messages_go_both_ways(host: Host) -> None:
    thread, news = in_background(host)
    guests = [find_host("127.0.0.1", [port_of(host), 1], KEY, time.monotonic() + 5) for _ in range(2)]
    for task, guest in enumerate(guests, start=1):
        guest.send(joined={"task": task, "host": f"n{task}"})
    guests[0].send(ended={"code": 3})
    guests[1].close()
    thread.join()
    assert host.missing() == []
    assert (1, {"ended": {"code": 3}}) in news
    assert (2, {"gone": True, "silent": False}) in news
    host.broadcast(go={"port": 5})
    host.flush(1.0)
    messages, _ = guests[0].receive()
    assert messages == [{"go": {"port": 5}}]
    guests[0].close()


@pytest.mark.slow
def test_strangers_on_the_ports_are_passed_by(host: Host) -> None:
    """One is silent, one talks another protocol, one is another job's meeting."""
    silent = socket.create_server(("127.0.0.1", 0))
    talker = socket.create_server(("127.0.0.1", 0))
    other = Host(socket.create_server(("127.0.0.1", 0)), b"another job's key", 2)

    def talk() -> None:
        for _ in range(3):
            try:
                talker.settimeout(3)
                connection, _ = talker.accept()
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            except OSError:
                return

    chatter = threading.Thread(target=talk, daemon=True)
    chatter.start()
    threads = [in_background(host, 4.0)[0], in_background(other, 4.0)[0]]
    ports = [silent.getsockname()[1], talker.getsockname()[1], port_of(other), port_of(host)]
    guest = find_host("127.0.0.1", ports, KEY, time.monotonic() + 10)
    assert guest.sock.getpeername()[1] == port_of(host)
    assert other.joined == {}
    for thread in threads:
        thread.join()
    guest.close()
    silent.close()
    talker.close()
    other.close()


def test_nothing_is_told_to_who_cannot_prove_the_key(host: Host) -> None:
    thread, news = in_background(host, 2.0)
    answers = []
    for line in NOISE:
        with socket.create_connection(("127.0.0.1", port_of(host)), timeout=1) as rogue:
            greeting = json.loads(rogue.makefile("rb").readline())
            try:
                rogue.sendall(line)
                answers.append(rogue.recv(100))
            except OSError:
                answers.append(b"")
            assert set(greeting) == {"greeting", "challenge"}
    thread.join()
    assert answers == [b""] * len(NOISE)
    assert news == [] and host.missing() == [1, 2]


def test_a_stranger_that_sends_anything_does_not_stop_a_guest() -> None:
    """The same noise from the other side: on the port that the guest tries."""
    greetings = (b"", *(b'{"greeting": "hpc-meeting-1", "challenge": %s}\n' % text for text in (b'"0"', b'"\\ud800"')))
    for answer in [greeting + line for line in NOISE for greeting in greetings]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(answer[:20_000])
            theirs.shutdown(socket.SHUT_WR)
            assert meeting._greet(Connection(ours), KEY) not in ("host", "wait")


def test_silent_strangers_are_let_go_of_when_they_are_many(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot use up the host's file descriptors, and a guest still gets in among them."""
    monkeypatch.setattr(meeting, "STRANGERS", 20)
    thread, _ = in_background(host, 1.0)
    rogues = [socket.create_connection(("127.0.0.1", port_of(host))) for _ in range(100)]
    guest = find_host("127.0.0.1", [port_of(host), 1], KEY, time.monotonic() + 5)
    guest.send(joined={"task": 1, "host": "n1"})
    thread.join()
    assert host.missing() == [2] and len(host.sockets()) <= 1 + 1 + host.tasks + 20
    for rogue in rogues:
        rogue.close()
    guest.close()


def test_a_proof_cannot_be_played_back(host: Host) -> None:
    assert meeting.proof(KEY, "abc", "guest") != meeting.proof(KEY, "abc", "host")
    assert meeting.proof(KEY, "abc", "guest") != meeting.proof(KEY, "abd", "guest")
    assert meeting.proof(KEY, "abc", "guest") != meeting.proof(b"other", "abc", "guest")


def test_a_task_that_joins_twice_is_refused(host: Host) -> None:
    thread, _ = in_background(host, 1.0)
    guests = [find_host("127.0.0.1", [port_of(host), 1], KEY, time.monotonic() + 5) for _ in range(2)]
    for guest in guests:
        guest.send(joined={"task": 1, "host": "n1"})
        time.sleep(0.2)
    thread.join()
    messages, gone = guests[1].receive()
    assert gone and messages[0]["stop"]["code"] == 78
    assert guests[0].receive() == ([], False)
    for guest in guests:
        guest.close()


def test_a_host_that_never_comes_is_an_error_within_the_limit() -> None:
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match="127.0.0.1 was not reached"):
        find_host("127.0.0.1", [1, 2], KEY, time.monotonic() + 1.0)
    assert 0.9 < time.monotonic() - begun < 5


@pytest.mark.slow
def test_a_host_that_comes_late_is_found() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = []

    def come() -> None:
        time.sleep(1.0)
        late = Host(socket.create_server(("127.0.0.1", port)), KEY, 2)
        hosts.append(late)
        serve(late, 3.0, [])

    thread = threading.Thread(target=come)
    thread.start()
    guest = find_host("127.0.0.1", [port, 1], KEY, time.monotonic() + 10)
    guest.close()
    thread.join()
    hosts[0].close()


def test_more_agents_than_the_usual_number_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    few = len(os.listdir("/proc/self/fd")) + 64
    guests: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        host = Host(server, KEY, 200)
        for _ in range(100):
            guests.append(socket.create_connection(server.getsockname(), timeout=10))
        host.accept()
        assert all(guest.recv(12) == b'{"greeting":' for guest in guests)
        host.close()
    finally:
        for guest in guests:
            guest.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_messages_at_once_are_no_nonsense_and_a_single_one_without_end_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MESSAGE_LIMIT", 4096)
    left, right = socket.socketpair()
    sender, receiver = Connection(left), Connection(right)
    receiver.proven = True
    for number in range(12):
        sender.send(failed={"number": number, "traceback": "x" * 2000})
    messages, gone = receiver.receive()
    assert [message["failed"]["number"] for message in messages] == list(range(12)) and not gone
    left.send(b"x" * 5000)
    assert receiver.receive()[1]
    sender.close()
    receiver.close()


def test_a_message_that_does_not_fit_into_the_sockets_memory_goes_on_its_way_by_and_by() -> None:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = Connection(left), Connection(right)
    receiver.proven = True
    sender.send(stacks="x" * 200_000)
    messages: list[dict[str, object]] = []
    deadline = time.monotonic() + 20
    while not messages and time.monotonic() < deadline:
        with selectors.DefaultSelector() as selector:
            for end in (sender, receiver):
                selector.register(end, end.events)
            for key, _ in selector.select(1.0):
                messages += key.fileobj.receive()[0]  # type: ignore[union-attr]
    assert messages == [{"stacks": "x" * 200_000}] and sender.events == selectors.EVENT_READ
    sender.close()
    receiver.close()
