"""A process that outlives a killed agent just long enough to end what the agent can no longer end.

It has left the agent's session and process tree, so that a SIGKILL for all of the step's tree leaves it be; it holds
none of the agent's files, and does nothing until the agent is gone. Where Slurm keeps the step in a control group
(proctrack/cgroup), it would be killed with everything else at once, but for what slurmstepd waits for after a task
(hpc/allocation/aftertask.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpc import beats
from hpc.node import processes, residue
from hpc.node.processes import Process

GRACE_S = 1.0
LOOK_S = 0.5  # only where the kernel has no pidfd_open


class Sentinel:
    """The agent's side of it."""

    def __init__(self, pid: int) -> None:
        self._process = processes.look_at(pid)

    @classmethod
    def start(cls, folder: Path | None) -> Sentinel | None:
        """Start one for this process, which is to be the agent; `folder` is removed after a killed agent.

        None where nothing in the environment tells this agent's processes from others' (outside of Slurm and of a
        controller, or in a worker of another agent), or no process can be made.
        """
        agent = processes.look_at(os.getpid())
        if agent is None or not agent.tag or beats.VARIABLE in os.environ:
            return None
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            first = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            return None
        if first == 0:
            _leave(writer, agent, folder)
        os.close(writer)
        try:
            os.waitpid(first, 0)
            text = os.read(reader, 32)
        finally:
            os.close(reader)
        return cls(int(text)) if text.isdigit() else None

    def dismiss(self) -> None:
        """The agent has ended everything itself."""
        if self._process is not None:
            processes.send(self._process, signal.SIGKILL)


def _leave(writer: int, agent: Process, folder: Path | None) -> None:
    """In the first child: a second one goes on, with this one's end it is nobody's."""
    try:
        os.setsid()
        second = os.fork()
        if second:
            os.write(writer, str(second).encode())
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, 65536)
        os.chdir("/")
        _wait_for_end(agent)
        clean_after(agent, folder)
    finally:
        os._exit(0)


def _wait_for_end(agent: Process) -> None:
    descriptor: int | None = None
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.pidfd_open(agent.pid)
    if descriptor is not None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while processes.lives(agent):
            poller.poll(60_000)
        return
    while processes.lives(agent):
        time.sleep(LOOK_S)


def clean_after(agent: Process, folder: Path | None) -> None:
    """End all that bears the agent's tag, and take away its folder and the shared memory of the dead."""

    def left() -> list[Process]:
        return [process for process in processes.look() if _is_of(agent, process)]

    processes.end(left, grace_s=GRACE_S)
    remove_residue(lambda text: None)
    if folder is not None:  # last of all: Slurm waits for it (hpc/allocation/aftertask.py)
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(agent: Process, process: Process) -> bool:
    """Whether the agent, or something that it started, started this; a shell around the agent is older than it."""
    return process.tag == agent.tag and process.started >= agent.started and process.pid not in (agent.pid, os.getpid())


def remove_residue(note: Callable[[str], None]) -> None:
    """Files of dead processes of this user; whoever else lives may still come back to the nameless ones."""
    own = processes.look_at(os.getpid())
    tag = own.tag if own is not None else ()
    try:
        alive = [process for process in processes.look(whole=True) if process.tag != tag or not tag]
        found = residue.find([process for process in alive if not process.is_login_shell], lambda _: False, note)
    except processes.Starved as why:
        note(f"files of dead processes are left where they are: {why}")
        return
    for one in found:
        residue.remove(one)
