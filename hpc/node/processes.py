"""This user's processes on this node, by pid and start time, with the mark of the job that each was started by.

The mark is what Slurm and the controller put into the environment of every process of a job; children inherit it
through setsid and double forks. A name or a command line never counts.

| variable | what it says of a process |
|---|---|
| SLURM_JOB_ID, SLURM_RESTART_COUNT | the job, and which of its attempts (unset in the first) |
| SLURM_CLUSTER_NAME, SLURMD_NODENAME | where slurmd started it; without a node's name there is no mark: `salloc` marks nobody |
| SLURM_STEP_ID, SLURM_PROCID | the job step and the task |
| HPC_MARK | the start of the step by a controller; of another job's it is none (`sbatch` in a job hands it on) |

Source: proc(5), /proc/PID/stat, status, environ, cgroup; sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.rundir import MARK_VARIABLE

_CGROUP_JOB = re.compile(r"/(?:slurm[^/]*/)(?:.*/)?job_([0-9]+)(?:/|$)", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
_STARVED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EIO)


class Starved(Exception):
    """The kernel did not answer for want of memory or descriptors, as in a job at its memory limit: nobody is told dead."""


def none_there(error: OSError) -> None:
    """Take an error for "there is no such thing, or it is not ours to see"; one that says neither is raised.

    Raises:
        Starved: the machine could not answer.
    """
    if error.errno in _STARVED:
        raise Starved(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The job that a process belongs to, by its environment."""

    job_id: str
    restarts: int
    node: str
    cluster: str
    step_id: str = ""
    task: str = ""
    start: str = ""
    """HPC_MARK, when it is this job's."""
    counted: bool = True
    """False: nothing says which attempt, as in a step that was started from outside of the job (`srun --jobid`)."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process as it was seen; `pid` and `started` (clock ticks after boot) together are never another's."""

    pid: int
    started: int
    parent: int
    session: int
    terminal: bool
    """It has a controlling terminal: somebody sits there."""
    command: tuple[str, ...]
    mark: Mark | None
    tag: tuple[str, ...]
    """What the environment says of the start, the step and the task, word for word; see `tag_of`."""
    cgroup_job: str | None
    """The job whose control group it is in, where Slurm keeps such groups."""

    @property
    def is_login_shell(self) -> bool:
        return bool(self.command) and self.command[0].startswith("-")

    @property
    def began(self) -> float:
        """In seconds since 1970."""
        return time.time() - self.age_s

    @property
    def age_s(self) -> float:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS)


def mark_of(environ: Mapping[str, str]) -> Mark | None:
    """The mark in a process's environment."""
    job_id, node = environ.get("SLURM_JOB_ID", ""), environ.get("SLURMD_NODENAME", "")
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    if not (_is_number(job_id) and _is_number(restarts) and node):
        return None
    start = environ.get(MARK_VARIABLE, "")
    start = start if start.startswith(f"{job_id}.{int(restarts)}.") else ""
    return Mark(
        job_id=job_id,
        restarts=int(restarts),
        node=node,
        cluster=environ.get("SLURM_CLUSTER_NAME", ""),
        step_id=environ.get("SLURM_STEP_ID", ""),
        task=environ.get("SLURM_PROCID", ""),
        start=start,
        counted=bool(environ.get("SLURM_RESTART_COUNT") or start or not environ.get("SLURM_STEP_ID")),
    )


def tag_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What all that one agent starts has in common, and nothing else has; () where nothing tells it from others."""
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_PROCID", "SLURMD_NODENAME")
    words = (environ.get(MARK_VARIABLE, ""), *(environ.get(name, "") for name in names))
    in_step = all(environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURMD_NODENAME"))
    return words if words[0] or in_step else ()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def node_name(environ: Mapping[str, str]) -> str:
    """What Slurm calls this node: told by slurmd inside a job, else the host's name up to the first dot."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def look(uid: int | None = None, *, whole: bool = False) -> list[Process]:
    """Every living process of a user (default: this one's), in the order of their numbers; zombies are left out.

    Raises:
        Starved: only when `whole` is wanted: one of them could not be looked at.
    """
    owner = os.getuid() if uid is None else uid
    found = (look_at(int(name), owner, whole=whole) for name in os.listdir("/proc") if name.isdecimal())
    return sorted((process for process in found if process is not None), key=lambda process: process.pid)


def look_at(pid: int, uid: int | None = None, *, whole: bool = False) -> Process | None:
    """The living process with this number if it is this user's, real and effective id both; else None."""
    owner = os.getuid() if uid is None else uid
    folder = Path("/proc") / str(pid)
    try:
        if os.stat(folder).st_uid not in (owner, 0):  # root's: one that may not be looked into
            return None
        before = _stat(folder)
        if before is None or _uids(folder) != {owner}:
            return None
        environ = _environ(folder)
        command = tuple(os.fsdecode((folder / "cmdline").read_bytes()).rstrip("\0").split("\0"))
        groups = ""
        with contextlib.suppress(PermissionError):
            groups = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
        after = _stat(folder)
    except ValueError:
        return None
    except OSError as error:
        if whole:
            none_there(error)
        return None
    if after is None or after[0] != before[0]:
        return None  # the number went to another process while it was read
    started, parent, session, terminal = after
    job = _CGROUP_JOB.search(groups)
    return Process(
        pid=pid,
        started=started,
        parent=parent,
        session=session,
        terminal=terminal,
        command=command,
        mark=mark_of(environ),
        tag=tag_of(environ),
        cgroup_job=job[1] if job else None,
    )


def _stat(folder: Path) -> tuple[int, int, int, bool] | None:
    """Start time, parent, session and whether there is a controlling terminal; None for one that has ended."""
    words = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    if words[0] in "ZX":
        return None
    return int(words[19]), int(words[1]), int(words[3]), words[4] != "0"


def _uids(folder: Path) -> set[int]:
    for line in (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Uid:"):
            return {int(word) for word in line.split()[1:3]}
    raise ValueError(folder)


def _environ(folder: Path) -> dict[str, str]:
    """The environment that the process was started with; {} where it may not be read."""
    try:
        data = (folder / "environ").read_bytes()
    except PermissionError:
        return {}
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals:
            found.setdefault(os.fsdecode(name), os.fsdecode(value))
    return found


def ancestors(pid: int | None = None) -> set[int]:
    """This process, its parent, and so on up."""
    found: set[int] = set()
    current = os.getpid() if pid is None else pid
    while current > 1 and current not in found:
        found.add(current)
        try:
            stat = _stat(Path("/proc") / str(current))
        except (OSError, ValueError):
            break
        if stat is None:
            break
        current = stat[1]
    return found


def descendants(roots: Iterable[Process], among: Sequence[Process]) -> list[Process]:
    """Those whose parent, or its parent and so on, is one of `roots`; the roots themselves are left out."""
    inside, found = {root.pid for root in roots}, dict[int, Process]()
    grown = True
    while grown:
        grown = False
        for process in among:
            if process.parent in inside and process.pid not in inside:
                inside.add(process.pid)
                found[process.pid] = process
                grown = True
    return list(found.values())


# ---- ending them -----------------------------------------------------------------------------------------------------


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False when it is gone, or its number is another's by now.

    The number is pinned by a descriptor first, then owner, start time and mark are compared again. Where the kernel
    has no such descriptor (before Linux 5.3), the comparison is made right before the signal.
    Source: pidfd_open(2), pidfd_send_signal(2).
    """
    try:
        descriptor: int | None = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        descriptor = None
    try:
        now = look_at(process.pid)
        if now is None or (now.started, now.mark) != (process.started, process.mark):
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
        return True
    except OSError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lives(process: Process) -> bool:
    now = look_at(process.pid)
    return now is not None and now.started == process.started


def end(find: Callable[[], Sequence[Process]], *, grace_s: float, limit_s: float = 5.0) -> list[Process]:
    """End all that `find` gives: SIGTERM, SIGKILL after `grace_s`, and again until it gives nothing more.

    Returns those that were ended; what still lives `limit_s` after the first SIGKILL (in uninterruptible sleep, say)
    is what `find` goes on giving.
    """
    told: dict[tuple[int, int], Process] = {}
    kill_at = time.monotonic() + grace_s
    while left := find():
        now = time.monotonic()
        if now > kill_at + limit_s:
            break
        for process in left:
            key = (process.pid, process.started)
            if now >= kill_at:
                send(process, signal.SIGKILL)
            elif key not in told:
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)  # a stopped one hears nothing else
            told[key] = process
        _wait(left, min(0.2, max(0.01, kill_at - now)))
    still = {(process.pid, process.started) for process in left}
    return [process for key, process in told.items() if key not in still]


def _wait(processes: Sequence[Process], seconds: float) -> None:
    """Until one of them ends, or the time is over."""
    poller, descriptors = select.poll(), []
    for process in processes:
        with contextlib.suppress(OSError, AttributeError):
            descriptors.append(os.pidfd_open(process.pid))
            poller.register(descriptors[-1], select.POLLIN)
    poller.poll(seconds * 1000)
    for descriptor in descriptors:
        os.close(descriptor)
