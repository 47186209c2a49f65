"""What rank zero's agent does when Slurm ends the job and nobody is left in the batch step: it lets the controller decide.

With proctrack/cgroup Slurm kills the batch step as soon as the batch script has died; the steps get SIGTERM and live for
KillWait (seen with 22.05.8). Whether the job may come back is not the agent's to say: hpc.launch asks Slurm.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from hpc.node.environment import TaskEnvironment
from hpc.node.standby import Standby
from hpc.rundir import RUN_DIR_VARIABLE

LIMIT_S = 60.0  # Slurm's SIGKILL comes before


def speak(task: TaskEnvironment, controller: Standby | None, cwd: str | None) -> bool:
    """When the agent's last act is due: run the controller once more, in this task, where it has died. False: it has not.

    A controller that a warden follows up is none of this agent's business: then Slurm says that the job runs.
    """
    if controller is None or not task.job_id or task.task_rank != 0 or not controller.is_deserted():
        return False
    argv = [sys.executable, "-m", "hpc.launch", "--last-word", "--run-dir", os.environ.get(RUN_DIR_VARIABLE, "")]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # nobody is left to hear of it
        subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    return True
