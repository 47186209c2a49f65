"""Processes that outlive their worker: found by descent from this agent, ended by pidfd, never by name."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil


def descendants(spare: Collection[int] = ()) -> list[psutil.Process]:
    """Every living descendant of this process except those in `spare` (and theirs).

    Complete for a child subreaper: a process whose parent has ended becomes a child of the nearest subreaper above
    it, whatever session or group it is in. Source: prctl(2), PR_SET_CHILD_SUBREAPER.

    Raises:
        OSError: the kernel could not tell, as in a job at its memory limit.
    """
    found = []
    try:
        children = psutil.Process().children()
    except psutil.Error:
        return []
    for child in children:
        if child.pid in spare:
            continue
        try:
            found.extend([child, *child.children(recursive=True)])
        except psutil.Error:
            found.append(child)
    return [process for process in found if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
    except OSError:
        return True  # no answer: the signal goes to it or to nobody


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process, not to another that got its number since; False when it is gone.

    Source: pidfd_open(2), pidfd_send_signal(2).
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not process.is_running():  # compares the start time, after the descriptor pins the number
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def end_descendants(spare: Collection[int] = (), limit_s: float = 5.0) -> int:
    """Kill every descendant but those in `spare`, look again until none is left; returns how many were ended.

    Zombies among this process's children are reaped. Gives up after `limit_s` seconds (a process in uninterruptible
    sleep cannot be ended by anybody).
    """
    ended: set[int] = set()
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # no answer is not "none is left"
            left = descendants(spare)
            for process in left:
                if send(process, signal.SIGKILL):
                    ended.add(process.pid)
            reap(spare)
            if not left:
                break
        time.sleep(0.01)
    return len(ended)


def reap(spare: Collection[int] = ()) -> None:
    """Collect every ended child that nobody else waits for, so that no zombie stays."""
    try:
        children = psutil.Process().children()
    except psutil.Error:
        return
    for child in children:
        if child.pid not in spare:
            try:
                os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                continue
