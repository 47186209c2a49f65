"""From this task's own place to the ranks of its workers: find the other agents, agree on counts, port and order."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from hpc.errors import EnvironmentMismatch, NoRoom, RendezvousError
from hpc.node import environment, rendezvous
from hpc.node.environment import TaskEnvironment
from hpc.node.meeting import Connection, Host, find_host
from hpc.node.signals import FORWARDED
from hpc.node.worker import die_with_parent
from hpc.ranks import RankInfo, Rendezvous, ranges
from hpc.rundir import ATTEMPT_VARIABLE, SECRET_VARIABLE
from hpc.slurm.nodelist import parse_tasks_per_node

SETTLE_S = 0.5  # a signal to a whole step does not reach every task in the same moment


@dataclass(frozen=True, kw_only=True)
class Go:
    """What the meeting agreed on, for this task."""

    infos: list[RankInfo]
    rendezvous: Rendezvous
    places: list[tuple[str, int, int]]
    """For each task: host, first rank, workers; only rank zero's agent knows all of it."""
    environ: dict[str, str] = field(default_factory=dict)


class OthersEnded(RendezvousError):
    """Nothing is wrong here: another task has ended, or told why all have to."""


class Assembly:
    """One task's part in the meeting; afterwards it holds the connection(s) and the store."""

    def __init__(self, task: TaskEnvironment, *, timeout_s: float, allow_loopback: bool, note: Callable[[str], None]):
        self.task, self.timeout_s, self.note = task, timeout_s, note
        self.allow_loopback = allow_loopback
        attempt = os.environ.get(ATTEMPT_VARIABLE) or str(task.restart_count)
        if not attempt.isdecimal():
            raise EnvironmentMismatch(f"{ATTEMPT_VARIABLE}={attempt!r} is not a number; unset it")
        self.attempt = int(attempt)
        self.host: Host | None = None
        self.guest: Connection | None = None
        self.store_pid: int | None = None
        self.clock_offset_s = 0.0
        """What rank zero's clock is ahead of this node's; known from the meeting on, off by one message's way."""
        self._secret = os.environ.pop(SECRET_VARIABLE, "")
        self._store: socket.socket | None = None
        self._address = ""
        self._deadline = 0.0

    @property
    def is_host(self) -> bool:
        return self.task.task_rank == 0

    @property
    def _first_rank(self) -> int:
        return self.task.task_rank * self.task.workers  # good enough for a message before the counts are known

    def open(self) -> None:
        """Check the master and, on rank zero's agent, take the ports. Quick: done before torch is imported.

        Raises:
            RendezvousError: the master does not resolve, is loopback for several nodes, or has no free port.
        """
        task = self.task
        self._address = rendezvous.master_address(
            task.master_host, nodes=len(task.tasks_of_nodes), rank=self._first_rank, allow_loopback=self.allow_loopback
        )
        if not self.is_host:
            return
        bind = self._address
        if rendezvous.interface_of(bind) is None and not bind.startswith("127."):
            self.note(f"MASTER_ADDR {bind} is on no interface of {socket.gethostname()}: listening on all of them")
            bind = "::" if ":" in bind else "0.0.0.0"
        ports = self._ports()
        store_ports = ports if task.preset_port is None else [task.preset_port]
        self._store = rendezvous.listen(bind, store_ports)
        if task.tasks > 1:
            meeting = rendezvous.listen(bind, [port for port in ports if port != self._store.getsockname()[1]])
            self.host = Host(meeting, self._key(), task.tasks)

    def _ports(self) -> list[int]:
        task = self.task
        return rendezvous.candidate_ports(task.job_id, task.array_index, self.attempt, self._secret, task.step_id)

    def _key(self) -> bytes:
        task = self.task
        return f"{self._secret}:{os.geteuid()}:{task.job_id}:{task.array_index}:{task.step_id}:{self.attempt}".encode()

    def meet(self) -> Go:
        """Wait until every task of the step has arrived, then return the ranks of this one's workers.

        Raises:
            RendezvousError: somebody never arrived within the limit; ranks and nodes are named.
            EnvironmentMismatch: two tasks disagree on the counts; both values are named.
        """
        self._deadline = time.monotonic() + self.timeout_s  # from here: importing torch may have taken its time
        facts = {
            "task": self.task.task_rank,
            "host": socket.gethostname(),
            "node": self.task.node_rank,
            "workers": self.task.workers,
            "tasks": self.task.tasks,
            "nodes": len(self.task.tasks_of_nodes),
            "layout": self.task.layout,
        }
        if self.task.tasks == 1:
            assert self._store is not None
            return self._go([self.task.workers], {0: facts}, self._store.getsockname()[1])
        return self._meet_as_host(facts) if self.is_host else self._meet_as_guest(facts)

    def _meet_as_host(self, facts: Mapping[str, Any]) -> Go:
        host, store = self.host, self._store
        assert host is not None and store is not None
        host.join_self(self.task.task_rank, facts)
        while host.missing():
            with selectors.DefaultSelector() as selector:
                for sock in host.sockets():
                    selector.register(sock, selectors.EVENT_READ)
                ready = selector.select(max(0.0, self._deadline - time.monotonic()))
            if not ready and time.monotonic() >= self._deadline:
                self._give_up(RendezvousError(self._never_arrived(host.missing())))
            for key, _ in ready:
                if key.fileobj is host.server:
                    host.accept()
                elif isinstance(key.fileobj, Connection):
                    for task, message in host.serve(key.fileobj):
                        if "gone" in message:
                            place = host.joined[task]["host"]
                            time.sleep(SETTLE_S)  # a signal that ended it may be on its way here too
                            self._give_up(OthersEnded(f"the agent on {place} ended before every rank had arrived"))
        for other in host.joined.values():
            for name in ("tasks", "nodes", "layout"):
                if other[name] != facts[name]:
                    self._give_up(
                        EnvironmentMismatch(
                            f"{facts['host']} counts {name}={facts[name]}, {other['host']} counts {name}={other[name]}: "
                            f"start all tasks with the same options, by one srun"
                        )
                    )
        workers = [host.joined[task]["workers"] for task in range(self.task.tasks)]
        port = store.getsockname()[1]
        host.broadcast(go={"workers": _compress(workers), "port": port, "clock": time.time()})
        return self._go(workers, host.joined, port)

    def _give_up(self, error: RendezvousError | EnvironmentMismatch) -> None:
        assert self.host is not None
        self.host.broadcast(stop={"code": error.exit_code, "message": str(error)})
        self.host.flush(2.0)
        raise error

    def _never_arrived(self, missing: list[int]) -> str:
        assert self.host is not None
        block = all(self._node_of_task(task) == facts["node"] for task, facts in self.host.joined.items())
        by_host: dict[str, list[int]] = {}
        for task in missing:
            ranks = range(task * self.task.workers, (task + 1) * self.task.workers)
            name = self._host_name(self._node_of_task(task)) if block else "unknown"
            by_host.setdefault(name, []).extend(ranks)
        shown = [f"ranks {ranges(ranks)} (node {name})" for name, ranks in list(by_host.items())[:8]]
        more = f" and {len(by_host) - 8} more nodes" if len(by_host) > 8 else ""
        return (
            f"rank {self._first_rank} on {socket.gethostname()}: {', '.join(shown)}{more} never arrived within "
            f"{self.timeout_s:.0f} s: look whether their tasks were started (one srun over all nodes) and at those nodes; "
            f"a slow file system needs a larger launch.rendezvous_timeout_s"
        )

    def _node_of_task(self, task: int) -> int:
        """Where Slurm's block distribution places a task."""
        first = 0
        for node, count in enumerate(self.task.tasks_of_nodes):
            first += count
            if task < first:
                return node
        return -1

    def _host_name(self, node: int) -> str:
        return self.task.hosts[node] if 0 <= node < len(self.task.hosts) else "unknown"

    def _meet_as_guest(self, facts: Mapping[str, Any]) -> Go:
        me = f"rank {self._first_rank} on {socket.gethostname()}"
        try:
            self.guest = find_host(self._address, self._ports(), self._key(), self._deadline)
        except RendezvousError as error:
            raise RendezvousError(
                f"{me}: {error} within {self.timeout_s:.0f} s: look whether rank 0 was started on {self.task.master_host} "
                f"and whether a firewall lies between; MASTER_ADDR chooses another address"
            ) from None
        self.guest.send(joined=dict(facts))
        patience = self._deadline + 10.0  # the host's own verdict comes first, and names who is missing
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(self.guest, selectors.EVENT_READ)
                selector.select(max(0.0, patience - time.monotonic()))
            messages, gone = self.guest.receive()
            for message in messages:
                if "go" in message:
                    go = message["go"]
                    self.clock_offset_s = float(go["clock"]) - time.time()
                    return self._go(parse_tasks_per_node(go["workers"]), {}, int(go["port"]))
                if "stop" in message:
                    kind = EnvironmentMismatch if message["stop"]["code"] == 78 else OthersEnded
                    raise kind(f"{me}: told by rank zero's agent: {message['stop']['message']}")
            if gone or time.monotonic() > patience:
                time.sleep(SETTLE_S)
                raise OthersEnded(
                    f"{me}: rank zero's agent on {self.task.master_host} ended before the start; see its line"
                )

    def _go(self, workers: list[int], joined: Mapping[int, Mapping[str, Any]], port: int) -> Go:
        several_nodes = len(self.task.tasks_of_nodes) > 1
        places = []
        first = 0
        for task, count in enumerate(workers):
            if task in joined:
                places.append((str(joined[task]["host"]), first, count))
            first += count
        # the number and not the name: no rank has to look it up. What the user preset stays as it is.
        master = os.environ.get("MASTER_ADDR") or self._address
        environ = {}
        if several_nodes:
            own = self.task.hosts[self.task.node_rank] if self.task.hosts else None
            other = next((host for host in self.task.hosts if host != own), None)
            peer = self._address
            if self.is_host and other is not None:
                try:
                    peer = rendezvous.resolve(other, 5.0)
                except RendezvousError:
                    peer = self._address
            environ.update(rendezvous.socket_interface(peer, self.note))
        return Go(
            infos=environment.rank_infos(self.task, workers),
            rendezvous=Rendezvous(host=master, port=port),
            places=places,
            environ=environ,
        )

    def start_store(self) -> dict[str, str]:
        """Start the store's process (rank zero's agent); every task gets the variables that make workers its clients.

        Where torch cannot be imported there is no store: the port is given back and a worker has to bind it.

        Raises:
            NoRoom: there can be no process for it.
        """
        if find_spec("torch") is None:
            if self._store is not None:
                self._store.close()
            return {}
        if self._store is not None:
            server, agent = self._store, os.getpid()
            host, port = server.getsockname()[:2]
            try:
                pid = os.fork()
            except OSError as error:
                raise NoRoom(f"the store of {socket.gethostname()}", error) from None
            if pid == 0:
                self._serve_store(server.fileno(), str(host), int(port), agent)
            self.store_pid = pid
            server.close()
            self._store = None
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def _serve_store(self, descriptor: int, host: str, port: int, agent: int) -> None:
        try:
            os.setsid()
            die_with_parent(agent)
            for number in FORWARDED:
                signal.signal(number, signal.SIG_IGN)  # a notice to the whole step: the workers agree through the store
            if "torch" in sys.modules:
                from hpc.node.store import serve

                serve(descriptor, host, port)
            os.set_inheritable(descriptor, True)
            os.execv(sys.executable, [sys.executable, "-m", "hpc.node.store", str(descriptor), host, str(port)])
        finally:
            os._exit(1)

    def close(self) -> None:
        """Close this process's ends, in a forked worker or at the end."""
        if self.host is not None:
            self.host.close()
        if self.guest is not None:
            self.guest.close()
        if self._store is not None:
            self._store.close()


def _compress(counts: list[int]) -> str:
    """Slurm's repeat notation: [4, 4, 2] gives "4(x2),2", so that a thousand nodes make one short line."""
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in groups)
