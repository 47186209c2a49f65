"""The process that the batch step is, and the controller under it: when that is killed, there comes another one.

A job ends with its batch script, so the controller may not be the batch script itself. `stand` forks before anything
large is imported: the parent, the warden, only waits, passes signals on, and ends as the controller ends. The controllers
are its children, one after the other. What a killed one has started becomes the warden's: its srun is told to end the
step, and when nothing is left the next controller begins, told what the last one had told the warden.

Slurm sends the signals of a batch step to every process in it (proctrack/linuxproc), or to the batch script alone
(proctrack/cgroup), and a terminal to its foreground: so the warden passes each one on as a real-time signal, and the
controller takes two that come by different ways within a second for one.

Source: prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER; signal(7), "Real-time signals"; memfd_create(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from hpc import exitcodes

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGQUIT,
    signal.SIGCONT,
    signal.SIGALRM,
    signal.SIGXCPU,
)
"""All that slurm.signal may name, and what the controller hears besides."""
TWICE_S = 1.0
"""The same signal directly and through the warden within so many seconds is one. srun takes SIGINT twice for an order."""
STEP_ENDS_S = 90.0
"""How long what a killed controller has started may take to end; then it is killed."""
LOOK_S = 1.0
STILLBORN_LIMIT = 3
"""Controllers in a row that are killed before they have started anything: then the job ends."""
_SETTING_LIMIT = 65536
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = frozenset(PASSED_ON) | {signal.SIGPIPE}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _passed(number: int) -> int:
    """The real-time signal that stands for one that is passed on; the first one tells that the warden has died."""
    return signal.SIGRTMIN + number


_ALL = frozenset(PASSED_ON) | frozenset(map(_passed, (0, *PASSED_ON)))


class Past:
    """What the next controller is told of one that was killed."""

    def __init__(self, number: int, standing: Mapping[str, Any] | None, heard: Iterable[int] = ()) -> None:
        self.number = number
        """The signal that killed it."""
        self.standing = standing
        """What it had told last; None when it had started nothing yet."""
        self.heard = tuple(heard)
        """The signals that came to it or one before it, and after its end."""

    @property
    def cause(self) -> str:
        return f"the controller was {exitcodes.describe(128 + self.number)}"


class Ward:
    """The controller's side; without a warden signals come directly and nobody is told anything."""

    def __init__(self, store: int | None = None, past: Past | None = None) -> None:
        self.past = past
        self.is_orphaned = False
        """The warden has died, and with it the batch script."""
        self.standing = "null"
        """What was told last, as JSON."""
        self._store = store
        self._early: list[int] = []
        self._unpaired: dict[int, tuple[bool, float]] = {}
        self._numbers: frozenset[int] = frozenset()
        self._hear: Callable[[int, FrameType | None], None] | None = None

    @property
    def is_guarded(self) -> bool:
        """Whether a warden has started this process."""
        return self._store is not None

    def listen(self, numbers: Iterable[int], hear: Callable[[int, FrameType | None], None]) -> None:
        """Have `hear` called as a handler for each of these signals from now on, and for those that have come already.

        The others do again what they do without a handler.
        """
        self._numbers = frozenset(numbers)
        for number in self._numbers:
            signal.signal(number, self._arrives if self._store is not None else hear)
        self._hear = hear
        if self._store is not None:
            for number in frozenset(PASSED_ON) - self._numbers:
                signal.signal(number, signal.SIG_DFL)
        early, self._early = self._early, []
        for number in early:
            self._act(number)

    def retire(self) -> None:
        """No signal from here on: the interpreter gives up its handlers before it ends, and one in between would kill it."""
        if self._store is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)

    def tell(self, standing: Mapping[str, Any]) -> None:
        """What the next controller has to know of this one, should it be killed from now on."""
        self.standing = json.dumps(standing)
        if self._store is not None:
            os.pwrite(self._store, self.standing.encode() + b"\n", 0)  # whole, whenever this process is killed

    def _note_early(self) -> None:
        for number in PASSED_ON:
            signal.signal(number, self._arrives)
            signal.signal(_passed(number), self._arrives)
        signal.signal(signal.SIGRTMIN, self._arrives)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        passed_on = number >= signal.SIGRTMIN
        if number == signal.SIGRTMIN:
            self.is_orphaned = True
            number = signal.SIGTERM
        elif passed_on:
            number -= signal.SIGRTMIN
        now = time.monotonic()
        other = self._unpaired.pop(number, None)
        if other is not None and other[0] != passed_on and now - other[1] < TWICE_S:
            return
        self._unpaired[number] = (passed_on, now)
        self._act(number)

    def _act(self, number: int) -> None:
        if self._hear is None:
            self._early.append(number)
        elif number in self._numbers:
            self._hear(number, None)
        else:
            os.kill(os.getpid(), number)


class _Warden:
    """The parent of the controllers."""

    def __init__(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._store = os.memfd_create("controller")  # closed at exec
        self._controller: int | None = None
        self._heard: dict[int, None] = {}
        self._stillborn = 0

    def fork(self, past: Past | None) -> Ward | None:
        """Start a controller; returns its side in the controller, and None in the warden. All signals are held back."""
        os.ftruncate(self._store, 0)
        warden = os.getpid()
        self._controller = os.fork()
        if self._controller:
            return None
        _prctl(_PR_SET_PDEATHSIG, signal.SIGRTMIN)
        if os.getppid() != warden:
            os._exit(exitcodes.UNAVAILABLE)
        ward = Ward(self._store, past)
        ward._note_early()
        return ward

    def wait(self) -> int | Past:
        """Pass signals on until the controller has ended: the job's exit code, or what its successor has to know."""
        status = None
        while status is None:
            number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
            if number == signal.SIGCHLD:
                status = self._reap()
            else:
                self._pass_on(number)
        code = os.waitstatus_to_exitcode(status)
        if -code - signal.SIGRTMIN in PASSED_ON:
            code += signal.SIGRTMIN
        if code >= 0 or -code in _ENDS:
            if any(map(_starts_agents, _children())):  # a fault of the toolkit's own: it has left its step behind
                self._wait_for_step()
            return exitcodes.from_returncode(code)
        past = Past(-code, self._standing())
        self._stillborn = self._stillborn + 1 if past.standing is None else 0
        if self._stillborn >= STILLBORN_LIMIT:
            _say(f"{past.cause}, as {self._stillborn - 1} before it, and none had started anything: the job ends")
            return exitcodes.from_returncode(code)
        _say(f"{past.cause}; when its step is over, another one goes on")
        self._wait_for_step()
        past.heard = tuple(self._heard)
        return past

    def _pass_on(self, number: int) -> None:
        self._heard[number] = None
        if self._controller is not None:
            os.kill(self._controller, _passed(number))  # our own child, not yet waited for

    def _reap(self) -> int | None:
        """Collect every child that has ended; returns the controller's status when it is one of them."""
        status = None
        while True:
            try:
                pid, ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == 0:
                return status
            if pid == self._controller:
                self._controller, status = None, ended

    def _standing(self) -> Mapping[str, Any] | None:
        try:
            standing = json.loads(os.pread(self._store, _SETTING_LIMIT, 0).partition(b"\n")[0])
        except ValueError:
            return None
        return standing if isinstance(standing, dict) else None

    def _wait_for_step(self) -> None:
        """End the step, and wait until nothing is left of what the controller had started; what does not end is killed."""
        told: set[int] = set()
        for last in (False, True):
            deadline = time.monotonic() + STEP_ENDS_S
            while (left := deadline - time.monotonic()) > 0:
                try:
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return
                for pid in [pid for pid in _children() if pid not in told and _starts_agents(pid)]:
                    told.add(pid)
                    os.kill(pid, signal.SIGTERM)  # a child of ours, not yet waited for
                info = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, min(left, LOOK_S))
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self._heard[info.si_signo] = None
            for pid in [] if last else _children():
                os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Field 4 of proc_pid_stat(5) is the parent."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stream:
            if int(stream.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


def _starts_agents(pid: int) -> bool:
    """Whether this is the srun of a step: an agent's command stands in its own."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return b"hpc.node" in stream.read().split(b"\0")
    except OSError:
        return False


def _say(text: str) -> None:
    os.write(2, f"hpc.launch: {text}\n".encode())


def stand(argv: list[str], environ: Mapping[str, str]) -> Ward:
    """In a batch step: become the warden, and return in each controller that it starts. Elsewhere nothing is done.

    To be called before there are threads, and before what takes memory is imported.
    """
    words = argv[: argv.index("--")] if "--" in argv else argv
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_TASK_PID") or "--local" in words:
        return Ward()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL | {signal.SIGCHLD})
    warden, past = _Warden(), None
    while True:
        ward = warden.fork(past)
        if ward is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            return ward
        told = warden.wait()
        if isinstance(told, int):
            os._exit(told)
        past = told
