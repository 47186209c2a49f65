"""What a worker process is before its own code runs: its session, environment, cores and streams.

A Python script or module runs in a fork of the agent that has torch imported already; anything else, or everything
when forking is off, in a process of its own program. Either way it finds what torchrun would give it: the same
variables and arguments, and its exit code is passed on as it is.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import functools
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from hpc import beats
from hpc.command import Target
from hpc.node import signals
from hpc.node.signals import WARNINGS

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies. Source: prctl(2), PR_SET_PDEATHSIG."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Source: prctl(2), PR_SET_CHILD_SUBREAPER."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One worker about to start: everything its process needs to know."""

    target: Target
    environ: Mapping[str, str]
    cores: Sequence[int]
    stdout: int
    stderr: int
    agent: int
    """The agent's process id."""
    shared: Sequence[int] = ()
    """The descriptors of what it shares with its agent: see hpc/beats.py."""

    warnings: Sequence[signal.Signals] = WARNINGS
    """What must not kill a script that has no handler for it."""

    def enter(self) -> None:
        """In the new process: a session of its own, death with the agent, its streams, its cores, its signals."""
        os.setsid()
        die_with_parent(self.agent)
        os.dup2(self.stdout, 1)
        os.dup2(self.stderr, 2)
        for descriptor in self.shared:
            os.set_inheritable(descriptor, True)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.target.is_training:  # which lets signals in itself, once it listens: none is lost before
            for number in self.warnings:
                signal.signal(number, signal.SIG_IGN)
            signals.release()

    def become(self) -> int:
        """In a forked process: run the target as Python's `__main__`; returns its exit code or raises SystemExit."""
        os.environ.clear()
        os.environ.update(self.environ)
        tempfile.tempdir = None  # chosen anew, by this environment
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        beats.show_stacks_on_request()
        _reseed(int(self.environ.get("OMP_NUM_THREADS", "0") or 0))
        keep_ended_groups()
        try:
            run_as_main(self.target)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            write_error_file(self.environ.get(ERROR_FILE_VARIABLE), error)
            error = error.with_traceback(_own_frames(error.__traceback__))  # torch's own hook looks only there
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        return 0


_ended_groups: list[object] = []


def keep_ended_groups() -> None:
    """Keep process groups that the script ends until it leaves; nothing to do where torch is not imported.

    When a script returns from the function that holds its DDP model, the model's reducer may have the last reference to
    a group that was ended before. Gloo's destructor then joins a thread that waits for the GIL, which this thread holds:
    the rank never exits (seen with torch 2.13, with eight ranks about once in three runs). Python's own reference lets
    go of the GIL, so it is made the last one.
    """
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available():
        return
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: object = None) -> object:
        _ended_groups.extend(one for one in (group, dist.group.WORLD) if one is not None)
        return original(group)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group
    atexit.register(_ended_groups.clear)


def run_as_main(target: Target) -> None:
    """Run a script or module as Python's `__main__`, as `python script.py` or `python -m module` would.

    The module stays `__main__` until the interpreter ends (runpy would take it away and free what it holds at once:
    with torch 2.13 a DDP model freed while its group's thread still needs the interpreter's lock never ends).

    Raises:
        ModuleNotFoundError: no such module, or a package without a `__main__`.
        Whatever the code raises.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if target.kind == "script":
        path = os.path.abspath(target.name)
        sys.path[0] = os.path.dirname(path)
        main.__file__ = path
        if path.endswith(".pyc"):
            code = importlib.machinery.SourcelessFileLoader("__main__", path).get_code("__main__")
        else:
            with io.open_code(path) as stream:
                code = compile(stream.read(), path, "exec", dont_inherit=True)
    else:
        spec = importlib.util.find_spec(target.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target.name}.__main__")
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            raise ModuleNotFoundError(f"no module named {target.name!r} that can be run with -m", name=target.name)
        code = spec.loader.get_code(spec.name)
        main.__file__ = path = spec.origin or target.name
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    sys.argv = [target.name if target.kind == "script" else path, *target.arguments]
    sys.modules["__main__"] = main
    assert code is not None
    exec(code, main.__dict__)


def _reseed(threads: int) -> None:
    """What a fresh interpreter would have of its own: NumPy's global generator, and torch's number of threads."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and threads > 0:
        torch.set_num_threads(threads)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file, as the script's own interpreter would show it."""
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename == __file__:
        kept = kept.tb_next
    return kept or trace


def write_error_file(path: str | None, error: BaseException) -> None:
    """Write torchrun's error file for an exception, before anything is torn down; an existing one is kept.

    Source: PyTorch documentation, "Error Propagation" (torch.distributed.elastic.multiprocessing.errors).
    """
    if not path or os.path.exists(path):
        return
    now = time.time()
    text = "".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__)))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "time": now},
    }
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            json.dump({"message": message}, stream)
    except OSError:
        return  # the traceback is still printed
