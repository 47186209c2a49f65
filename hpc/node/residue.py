"""What dead processes of this user left in /dev/shm and in the folders for temporary files.

Each kind is told by the name that torch, NCCL, CUDA, OpenMP or Python gives it, and then by who lives: a file with a
process id in its name is dead when that process is and nobody has the file open, mapped or bound; one with a job in its
name is dead with that job; any other one when nobody has it, and no process that could come back to it is as old.

| name | made by |
|---|---|
| /dev/shm/torch_PID_RANDOM_N | torch, tensors between processes (file_system sharing; torch/csrc: NewProcessWideShmHandle) |
| /dev/shm/nccl-XXXXXX | NCCL, buffers between ranks of a node (nccl: src/misc/shmutils.cc) |
| /dev/shm/sem.XXXX, psm_XXXX | POSIX semaphores; multiprocessing.shared_memory |
| /dev/shm/cuda.shm.UID.PIDHEX.N, __KMP_REGISTERED_LIB_PID_UID | CUDA; OpenMP's runtime |
| pymp-XXXX, torch-shm-dir-XXXX, torchelastic_XXXX | multiprocessing; torch's manager of shared memory; torchrun |
| hpc-UID-CLUSTER.JOB.RESTARTS.START-XXXX, hpc-UID-PID-TICKS-XXXX | this toolkit's agents, in a job and without one |
"""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc.node.processes import Process, none_there

SHM = Path("/dev/shm")
_PF_EXITING = 4  # include/linux/sched.h: it runs no code of its own any more, though its memory may take a while to go
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h: "0xEFFFFFFCU"
_WITH_PID = (
    re.compile(r"torch_([0-9]+)_[0-9]+_[0-9]+"),
    re.compile(r"__KMP_REGISTERED_LIB_([0-9]+)_[0-9]+"),
    re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.[0-9a-f]+"),
    re.compile(r"pym-([0-9]+)-\w+"),
)
_NAMELESS = re.compile(r"nccl-\w{6}|sem\.\S+|psm_\w+")
_TEMPORARY = re.compile(r"pymp-\w{8}|torch-shm-dir-\w{6}|torchelastic_\w{8}")
_OF_JOB = re.compile(r"hpc-[0-9]+-(?P<cluster>[\w-]*)\.(?P<job>[0-9]+)\.(?P<restarts>[0-9]+)\.(?P<start>[0-9]+)-\w{8}")
_BEGINNING = re.compile(r"torch|nccl-|sem\.|psm_|cuda\.shm\.|__KMP_|pym|hpc-")  # of all of them: most names are others
_OF_AGENT = re.compile(r"hpc-[0-9]+-(?P<pid>[0-9]+)-(?P<started>[0-9]+)-\w{8}")
CLOCK_STEP_S = 60.0
"""How far the clock may have been set forward since a file was made, and the number in its name still be its maker's."""


@dataclass(frozen=True, kw_only=True)
class Residue:
    """A file or folder of this user that nobody will come back to."""

    path: Path
    size: int
    """Bytes, of everything inside."""
    made: float
    """Seconds since 1970."""
    reason: str
    of_job: bool
    """Its name tells the job; of any other it is only known that its makers are dead."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The start of a job's step that one of this toolkit's folders was made for."""

    cluster: str
    job_id: str
    restarts: int
    start: int

    @property
    def prefix(self) -> str:
        """What such a folder's name begins with; mkdtemp adds the rest."""
        cluster = re.sub(r"[^\w-]", "_", self.cluster)
        return f"hpc-{os.getuid()}-{cluster}.{self.job_id}.{self.restarts}.{self.start}-"


@dataclass(frozen=True, kw_only=True)
class Maker:
    """The process that a name tells of."""

    pid: int
    started: int | None = None
    """Clock ticks after boot, which no setting of the clock changes; None where the name does not tell."""


def agents_prefix(agent: Process) -> str:
    """What the name of a folder begins with that belongs to an agent outside of any job; mkdtemp adds the rest."""
    return f"hpc-{os.getuid()}-{agent.pid}-{agent.started}-"


def folders() -> list[Path]:
    """Where temporary files may lie: TMPDIR's choice, /tmp and /var/tmp."""
    found = dict.fromkeys(Path(name) for name in (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    return [path for path in found if path.is_dir()]


def find(alive: Sequence[Process], over: Callable[[Folder], bool], note: Callable[[str], None]) -> list[Residue]:
    """All of it on this node.

    `alive`: this user's processes that are no leftovers and could come back to a file; `over`: whether the
    start of a step that made such a folder is over. In a container with process numbers of its own nothing is found, with a note:
    others that share these folders are not seen.

    Raises:
        Starved: the kernel could not tell who is alive or has a file.
    """
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        note("process numbers are this container's own: files of dead processes cannot be told here")
        return []
    oldest = min((time.time() - process.age_s for process in alive), default=math.inf)
    suspects: list[tuple[Path, os.stat_result, str]] = []
    found: list[Residue] = []
    for folder in (SHM, *folders()):
        for path, status in _own(folder, os.getuid()):
            kind = _kind(folder, path.name, status)
            if isinstance(kind, Folder):
                if over(kind):
                    why = f"attempt {kind.restarts} of job {kind.job_id} is over"
                    found.append(_residue(path, status, why, of_job=True))
            elif isinstance(kind, Maker):
                if not _lives(kind, status.st_ctime):
                    suspects.append((path, status, f"process {kind.pid} is dead"))
            elif kind == "nameless" and status.st_ctime < oldest:
                suspects.append((path, status, "nobody has it open, and nobody is as old"))
    held = _held() if suspects else set()
    found += [_residue(path, status, why) for path, status, why in suspects if not _inside(path) & held]
    return sorted(found, key=lambda one: one.path)


def _residue(path: Path, status: os.stat_result, reason: str, of_job: bool = False) -> Residue:
    return Residue(path=path, size=_size(path), made=status.st_ctime, reason=reason, of_job=of_job)


def remove(residue: Residue) -> bool:
    """Take it away; True when it is gone. Links are never followed, and nothing of another owner is touched."""
    try:
        if stat.S_ISDIR(os.lstat(residue.path).st_mode):
            shutil.rmtree(residue.path)
        else:
            residue.path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _own(folder: Path, owner: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        names = sorted(filter(_BEGINNING.match, os.listdir(folder)))
    except OSError:
        return
    for name in names:
        try:
            status = os.lstat(folder / name)
        except OSError:
            continue
        if status.st_uid == owner and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            yield folder / name, status


def _kind(folder: Path, name: str, status: os.stat_result) -> Folder | Maker | str | None:
    """The job, attempt and start, or the process, that a name tells of; "nameless" for kinds that tell nothing."""
    is_folder = stat.S_ISDIR(status.st_mode)
    if is_folder and folder != SHM:
        job = _OF_JOB.fullmatch(name)
        if job is not None:
            return Folder(
                cluster=job["cluster"], job_id=job["job"], restarts=int(job["restarts"]), start=int(job["start"])
            )
        agent = _OF_AGENT.fullmatch(name)
        if agent is not None:
            return Maker(pid=int(agent["pid"]), started=int(agent["started"]))
        return "nameless" if _TEMPORARY.fullmatch(name) else None
    if is_folder or folder != SHM:
        return None
    for pattern in _WITH_PID:
        match = pattern.fullmatch(name)
        if match is not None:
            return Maker(pid=int(match[1], 16 if name.startswith("cuda") else 10))
    return "nameless" if _NAMELESS.fullmatch(name) else None


def _lives(maker: Maker, made: float) -> bool:
    """Whether the process that made a file at that time still lives: its number alone may be another's by now."""
    try:
        ticks = _started(maker.pid)
    except ValueError:
        return False
    except IndexError:
        return True  # no answer is none about its death
    except OSError as error:
        none_there(error)
        return False
    if maker.started is not None:
        return ticks == maker.started
    # the earlier of the two clocks: whoever is held up in between makes the process older, not younger
    now = time.time()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s <= made + CLOCK_STEP_S


def _started(pid: int) -> int:
    """When the process began, in clock ticks after boot.

    Raises:
        ValueError: it has ended, even if nobody has waited for it yet.
    """
    words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if words[0] in "ZX" or int(words[6]) & _PF_EXITING:
        raise ValueError(pid)
    return int(words[19])


def _below(path: Path) -> Iterator[os.stat_result]:
    """The path and all below it, no link followed; what goes away meanwhile is left out.

    Raises:
        Starved: the kernel could not tell all of it.
    """
    todo = [path]
    while todo:
        name = todo.pop()
        try:
            status = os.lstat(name)
            if stat.S_ISDIR(status.st_mode):
                todo += map(name.joinpath, os.listdir(name))
        except OSError as error:
            none_there(error)
            continue
        yield status


def _inside(path: Path) -> set[tuple[int, int]]:
    """Device and inode of the path and of all below it."""
    return {(status.st_dev, status.st_ino) for status in _below(path)}


def _held() -> set[tuple[int, int]]:
    """Device and inode of everything that a process which may be looked into has open, mapped, or bound a socket to."""
    found: set[tuple[int, int]] = set()
    networks: set[tuple[int, int]] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        found |= _links(Path("/proc") / pid / "fd") | _links(Path("/proc") / pid, "cwd")
        found |= _mapped(pid)
        network = _links(Path("/proc") / pid / "ns", "net")
        if not network <= networks:
            networks |= network
            found |= _bound(pid)
    return found


def _links(folder: Path, only: str = "") -> set[tuple[int, int]]:
    """What a link in /proc, or each link of a folder there, leads to."""
    found: set[tuple[int, int]] = set()
    try:
        paths = [folder / name for name in ([only] if only else os.listdir(folder))]
    except OSError as error:
        none_there(error)
        return found
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            none_there(error)
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def _mapped(pid: str) -> set[tuple[int, int]]:
    """map_files may be closed to ordinary users; maps tells the same of what still has its name."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError as error:
        none_there(error)
        return set()
    return _identities(line.split(None, 5)[5] for line in text.splitlines() if "/dev/shm/" in line)


def _bound(pid: str) -> set[tuple[int, int]]:
    try:
        text = Path(f"/proc/{pid}/net/unix").read_text(errors="replace")
    except OSError as error:
        none_there(error)
        return set()
    words = (line.split() for line in text.splitlines()[1:])
    return _identities(word[7] for word in words if len(word) > 7 and word[7].startswith("/"))


def _identities(paths: Iterable[str]) -> set[tuple[int, int]]:
    found = set()
    for path in set(paths):
        try:
            status = os.stat(path)
        except OSError as error:
            none_there(error)
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def _size(path: Path) -> int:
    return sum(status.st_size for status in _below(path))
