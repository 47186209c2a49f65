"""What can go wrong, as a tree; each message says what was found, what was needed, and the next move.

HpcError                      exit code
├── UsageError                2    a flag, a value or a file given by the user
│   ├── ConfigError           2    a key or a value of the configuration
│   ├── RunDirectoryError     2    a run directory that is not ours alone, or cannot be made
│   └── SubmissionError       2    the cluster refused the job
├── EnvironmentMismatch       78   variables of the job that contradict each other or the machine
│   └── NodelistError         78   a host list that Slurm would refuse
├── RendezvousError           69   ranks that did not find each other
├── NeverStarted              69   a job step or worker that could not be started
│   ├── UnfitNode             69   a node on which no worker is worth a try
│   └── NoRoom                69   a machine with no room for another process
└── SlurmCommandError         1    a Slurm command that failed, hung or is missing
    └── SlurmUnreachable      78   no Slurm can be asked from this machine
"""

import errno
import io
import os
import sys

from hpc import exitcodes

_ROOM = {  # fork(2), memfd_create(2), pipe(2)
    errno.EAGAIN: "a limit on the number of processes is reached: look at ulimit -u, and at what else of yours runs here",
    errno.ENOMEM: "no memory is left for it: ask for more (--mem)",
    errno.EMFILE: "a limit on open files is reached: look at ulimit -n",
    errno.ENFILE: "the node has no open files left",
}
PACKAGES = ("omegaconf", "psutil", "submitit", "torch", "yaml")


class HpcError(Exception):
    """Base of all errors that a door prints as one line and turns into its exit code."""

    exit_code = exitcodes.FAILED


class UsageError(HpcError):
    """The user can mend it at the keyboard; nothing was made, started or submitted."""

    exit_code = exitcodes.USAGE


class ConfigError(UsageError):
    """A key that does not exist, or a value that cannot be meant."""


class RunDirectoryError(UsageError):
    """A run directory that somebody else owns or may write to, or that cannot be made."""


class SubmissionError(UsageError):
    """The cluster refused the job; nothing is queued."""


class EnvironmentMismatch(HpcError):
    """Variables that contradict each other; no rank was started."""

    exit_code = exitcodes.BAD_ENVIRONMENT


class NodelistError(EnvironmentMismatch):
    """A host list in no notation of Slurm's."""


class RendezvousError(HpcError):
    """Ranks that did not find each other within the limit."""

    exit_code = exitcodes.UNAVAILABLE


class NeverStarted(HpcError):
    """A job step or a worker that could not be started at all, as against one that failed."""

    exit_code = exitcodes.UNAVAILABLE


class UnfitNode(NeverStarted):
    """A node on which no worker is worth a try: it is left out of the next attempt."""


class NoRoom(NeverStarted):
    """A process that the machine, or a limit, has no room for."""

    def __init__(self, what: str, error: OSError, rank: int = -1) -> None:
        hint = _ROOM.get(error.errno or 0)
        super().__init__(f"{what} could not be started: {error.strerror or error}" + (f"; {hint}" if hint else ""))
        self.rank = rank
        """The worker's, -1 for what is none."""


class SlurmCommandError(HpcError):
    """A Slurm command that failed, did not answer in time, or is not on PATH."""


class SlurmUnreachable(SlurmCommandError):
    """No Slurm can be asked from this machine at all, at a door that is there to ask it."""

    exit_code = exitcodes.BAD_ENVIRONMENT


def printable(text: str) -> str:
    """The text with control characters escaped, so that no value can forge a line or drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, of a text of several lines: line breaks stay, and tabs become blanks."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))


def one_line(door: str, error: BaseException) -> str:
    """The line that a door prints for an error: "hpc.submit: error: what was found; what was needed"."""
    return f"{door}: error: {printable(str(error))}"


def print_any_text() -> None:
    """Let stdout escape what its encoding does not have, as stderr does: no name may stop a door that has done its work."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def check_working_directory() -> None:
    """Refuse to begin in a directory that somebody has removed, or whose file system has gone.

    Raises:
        UsageError: it cannot be named any more.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the working directory is not there any more ({error.strerror}); cd to another one") from None


def unreadable(error: OSError) -> UsageError:
    """For the doors: what cannot be read or written, as a refusal."""
    hint = (
        "; a run is its owner's alone, unless the owner opens it (chmod)" if isinstance(error, PermissionError) else ""
    )
    return UsageError(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}{hint}")


def report(door: str, error: HpcError | ModuleNotFoundError) -> int:
    """Print the error's one line on stderr and return its exit code; a package that is missing is one of ours, or raised."""
    if isinstance(error, ModuleNotFoundError):
        if error.name not in PACKAGES:
            raise error
        error = EnvironmentMismatch(
            f"{sys.executable} has no package {error.name}, which the toolkit needs; install it there "
            f"({sys.executable} -m pip install {error.name}), or name an interpreter that has it: "
            f"launch.python=FILE, or HPC_PYTHON=FILE for sbin/ddp.sbatch"
        )
    print(one_line(door, error), file=sys.stderr, flush=True)
    return error.exit_code
