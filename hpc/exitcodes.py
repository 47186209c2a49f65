"""The exit codes of every door, and how a process's end becomes one."""

import signal

DONE = 0
FAILED = 1
"""A fault of the toolkit or a failure that has no better code; a failing worker's own code is passed on as it is."""
USAGE = 2
"""Something typed or configured on the login node is wrong; nothing was made or submitted."""
UNAVAILABLE = 69
"""Workers never started, the ranks never found each other, or a node was lost (sysexits.h: EX_UNAVAILABLE)."""
WANTS_ANOTHER_ATTEMPT = 75
"""Saved, and wants to go on in another attempt (sysexits.h: EX_TEMPFAIL)."""
HUNG = 124
"""A worker was stopped, or made no step for too long, and was ended for it (as timeout(1) says it)."""
BAD_ENVIRONMENT = 78
"""The environment of the job contradicts itself (sysexits.h: EX_CONFIG); no rank was started. At a door: no Slurm to ask."""
INTERRUPTED = 130
"""Ctrl-C at a door that asks, watches or submits (128 + SIGINT); what it watched goes on."""


def from_returncode(returncode: int) -> int:
    """The shell's exit code for `subprocess`'s return code: -9 (killed by signal 9) gives 137.

    Source: bash(1), "EXIT STATUS".
    """
    return 128 - returncode if returncode < 0 else returncode


def describe(code: int) -> str:
    """An exit code in words: "exited 3", or "killed by SIGKILL, perhaps out of host memory"."""
    if code > 128:
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            return f"exited {code}"
        return f"killed by {name}" + (", perhaps out of host memory" if name == "SIGKILL" else "")
    return f"exited {code}"
