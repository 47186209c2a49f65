"""What rank zero's agent does when Slurm ends the job and nobody is left in the batch step: it lets the controller decide.

With proctrack/cgroup Slurm kills the batch step as soon as the batch script has died; the steps get SIGTERM and live for
KillWait (seen with 22.05.8). Whether the job may come back is not the agent's to say: hpc.launch asks Slurm.
"""

from __future__ import annotations

import os
import subprocess
import sys

from hpc.rundir import RUN_DIR_VARIABLE

LIMIT_S = 60.0  # Slurm's SIGKILL comes before


def speak(code: str | None) -> None:
    """Run the controller once more, in this task; returns when it has ended. `code`: where to start it."""
    argv = [sys.executable, "-m", "hpc.launch", "--last-word", "--run-dir", os.environ.get(RUN_DIR_VARIABLE, "")]
    try:
        subprocess.run(argv, cwd=code, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        pass  # nobody is left to hear of it; the user submits again
