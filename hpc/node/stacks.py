"""What ranks that hang are doing: their Python stacks, asked for before anybody is ended, and what they say together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.beats import STACKS_SIGNAL
from hpc.node.pulse import is_stopped
from hpc.node.signals import has_handler
from hpc.ranks import ranges

ANSWER_LIMIT_S = 2.0
"""How long a rank has for its stacks. It answers at once, unless it is stopped or has no processor."""
LIMIT_S = 4.0
"""How long rank zero's agent waits for what the other agents find."""
TEXT_LIMIT = 64 * 1024
FRAMES_SENT = 24
_POLL_S = 0.02
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SPY_FRAME = re.compile(r"^ {4}(?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d|^<")
_OWN_START = "run_as_main"  # hpc/node/worker.py: what is outside of it is the agent's
_WRAPPERS = re.compile(
    r"^(_?wrapper|_?inner|_fn|decorate_context|_?wrapped\w*|_call_impl|_wrapped_call_impl|__call__)$"
)
_WAITS = re.compile(
    r"^_?(all_reduce|all_gather|all_to_all|reduce_scatter|broadcast|reduce|gather|scatter|barrier|monitored_barrier|send"
    r"|recv|batch_isend_irecv|backward|await_rank_zero)(_\w+)?$"
)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The stacks of one rank. Plain values, which also travel from agent to agent."""

    rank: int
    host: str
    words: str
    """What its main thread does and where: "in all_reduce at loop.py:120"."""
    waits: bool
    """It waits for other ranks, as far as the stack can tell."""
    frames: tuple[str, ...] = ()
    """The main thread's, as Python prints them, the innermost last."""
    text: str = ""
    """All that was found, for the file; does not travel."""
    log: str = ""
    gpu: str | None = None
    step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": "", "frames": list(self.frames[-FRAMES_SENT:])}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Stack:
        known = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        return cls(**{**known, "frames": tuple(map(str, known.get("frames", ())))})


@dataclass(frozen=True)
class Group:
    """Ranks that do the same at the same place."""

    words: str
    waits: bool
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} {self.words}"
        return f"{len(self.ranks)} ranks ({ranges(self.ranks)}) {self.words}"


class StackMemory:
    """Where one worker writes its stacks when it is asked: memory, so that a shared disk that hangs does not matter."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpc-stacks", os.MFD_CLOEXEC)

    def ask(self, pid: int) -> bool:
        """Ask the worker for its stacks; False when it cannot answer: it is stopped, or no Python that we started."""
        if is_stopped(pid) or not has_handler(pid, STACKS_SIGNAL):
            return False
        os.ftruncate(self.descriptor, 0)
        os.lseek(self.descriptor, 0, os.SEEK_SET)  # its place is the worker's too
        os.kill(pid, STACKS_SIGNAL)
        return True

    def read(self) -> str:
        """What it has written so far."""
        return os.pread(self.descriptor, TEXT_LIMIT, 0).decode("utf-8", "replace")

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def collect(asked: Mapping[int, tuple[int, StackMemory]]) -> dict[int, tuple[str, str, Sequence[str]]]:
    """The stacks of this node's ranks, by rank: text, words, and the frames of the main thread, innermost last.

    `asked`: for each rank its process and its memory. Takes ANSWER_LIMIT_S at most, and as long again for each that does
    not answer where py-spy is installed.
    """
    texts: dict[int, str] = {}
    waiting = {rank for rank, (pid, memory) in asked.items() if memory.ask(pid)}
    deadline = time.monotonic() + ANSWER_LIMIT_S
    before: dict[int, str] = {}
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for rank in sorted(waiting):
            text = asked[rank][1].read()
            if text.endswith("\n") and "most recent call first" in text and before.get(rank) == text:
                texts[rank] = text
                waiting.discard(rank)
            before[rank] = text
    found: dict[int, tuple[str, str, Sequence[str]]] = {}
    for rank, (pid, _) in asked.items():
        text = texts.get(rank) or before.get(rank, "")
        if text:
            frames = main_frames(text)
            found[rank] = (text, words_of(frames), [str(frame) for frame in reversed(frames)])
        else:
            found[rank] = _from_outside(pid)
    return found


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def in_library(self) -> bool:
        return bool(_LIBRARY.search(self.file))

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line}, in {self.function}'


def main_frames(text: str) -> list[Frame]:
    """The main thread's frames, innermost first: faulthandler shows it last, since it is the oldest thread."""
    blocks: list[list[Frame]] = []
    for line in text.split("\n"):
        if "most recent call first" in line:
            blocks.append([])
        elif blocks and (match := _FRAME.match(line)):
            blocks[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return _without_own(blocks[-1] if blocks else [])


def words_of(frames: Sequence[Frame]) -> str:
    """ "in all_reduce at loop.py:120": what of a library was called, and from where in the code that is not a library's."""
    if not frames:
        return "with no Python stack"
    place = next((index for index, frame in enumerate(frames) if not frame.in_library), None)
    if place is None:
        return f"in {frames[0].function} at {os.path.basename(frames[0].file)}:{frames[0].line}"
    own = frames[place]
    called = next((f for f in reversed(frames[:place]) if not _WRAPPERS.match(f.function)), None)
    what = own.function if called is None else called.function
    if called is not None and called.function == "__next__" and os.path.basename(called.file) == "dataloader.py":
        what = "DataLoader next"
    return f"in {what} at {os.path.basename(own.file)}:{own.line}"


def waits(words: str) -> bool:
    """Whether a rank that is "in all_reduce at ..." waits for others."""
    return bool(_WAITS.match(words.removeprefix("in ").split(" ")[0]))


def _from_outside(pid: int) -> tuple[str, str, Sequence[str]]:
    """What can be seen of a process that does not answer: what the kernel says of it, and its stack where py-spy shows it."""
    status = dict(line.split(":", 1) for line in _proc(pid, "status").split("\n") if ":" in line)
    state, place, call = status.get("State", "?").strip(), _proc(pid, "wchan").strip(), _proc(pid, "syscall").strip()
    text = f"state {state}, waits in the kernel at {place or '?'}, system call {call or '?'}\n"
    words = f"without a Python stack, in state {state}" + (f" at {place}" if place not in ("", "0") else "")
    spied = _spy(pid)
    frames = spied_frames(spied, pid)
    if frames:
        words = words_of(frames)
    if is_stopped(pid):  # wherever that was, it waits for nobody
        words = "stopped by a signal"
    return text + spied, words, [str(frame) for frame in reversed(frames)]


def _spy(pid: int) -> str:
    """What py-spy says of a process; "" where it is not installed, or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    argv = [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def spied_frames(text: str, pid: int) -> list[Frame]:
    """The main thread's frames in what `py-spy dump` prints, innermost first.

    It bears the process's number, or its name where the program knows names (`import threading`). A method is shown
    with its class, which is left out as faulthandler does.
    """
    blocks: list[tuple[bool, list[Frame]]] = []
    for line in text.split("\n"):
        if line.startswith("Thread "):
            blocks.append((line.split()[1] == str(pid) or '"MainThread"' in line, []))
        elif blocks and (match := _SPY_FRAME.match(line)):
            function = match["function"].rpartition(".")[2]
            blocks[-1][1].append(Frame(match["file"], int(match["line"]), function))
    main = [frames for is_main, frames in blocks if is_main] or [frames for _, frames in blocks]
    return _without_own(main[0] if main else [])


def _without_own(frames: list[Frame]) -> list[Frame]:
    """What the agent's fork has below the script is left out."""
    ends = [index for index, frame in enumerate(frames) if frame.function == _OWN_START]
    return frames[: ends[0]] if ends else frames


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def groups_of(stacks: Iterable[Stack]) -> list[Group]:
    """Ranks that do the same at the same place, the largest group first."""
    found: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        found.setdefault(stack.words, []).append(stack)
    groups = [Group(words, same[0].waits, tuple(one.rank for one in same)) for words, same in found.items()]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def culprits(groups: Sequence[Group]) -> tuple[int, ...]:
    """The ranks for which the others wait; empty when the stacks do not tell.

    Those that are in no collective while others are in one; else, of different places, the smaller side of the ranks.
    """
    if len(groups) < 2:
        return ()
    busy = [group for group in groups if not group.waits]
    if busy and len(busy) < len(groups):
        return tuple(sorted(rank for group in busy for rank in group.ranks))
    largest, others = groups[0], sum(len(group.ranks) for group in groups[1:])
    if len(largest.ranks) <= others:
        return ()
    return tuple(sorted(rank for group in groups[1:] for rank in group.ranks))


def write_files(folder: Path, start: str, stacks: Sequence[Stack], summary: str | None) -> None:
    """Add what was found to attempt-N/stacks/: rank-R.txt for each of these ranks, and summary.txt when there is one.

    `start` says which start of the step it was.

    Raises:
        OSError: it cannot be written.
    """
    place = folder / "stacks"
    place.mkdir(mode=0o700, exist_ok=True)
    heading = f"{start}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    for stack in stacks:
        _append(
            place / f"rank-{stack.rank}.txt",
            f"==== {heading}: rank {stack.rank} on {stack.host} {stack.words}\n{stack.text}\n",
        )
    if summary is not None:
        _append(place / "summary.txt", f"==== {heading}\n{summary}\n")


def _append(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(text)
