"""The controller's last word, from a task of the step: the batch step has been killed, and Slurm ends the job for it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

from hpc import config
from hpc.allocation import allocation as allocations
from hpc.allocation.controller import Controller
from hpc.allocation.requeue import BATCH_KILLED, job_facts
from hpc.allocation.warden import Past, Ward
from hpc.rundir import ATTEMPT_VARIABLE, STANDING_VARIABLE, RunDirectory, check_own
from hpc.slurm.states import JobState

NOTICED_WITHIN_S = 5.0
"""How long Slurm may take to notice that the batch script has died: a second with proctrack/cgroup (seen with 22.05.8)."""
LOOK_S = 0.2


def speak(path: Path) -> int:
    """Decide about the run at `path` as its controller would have done, and act; returns an exit code.

    Nothing is done unless Slurm says that the batch script was killed, and that nobody has put the job back.

    Raises:
        HpcError: Slurm gives no answer, or the run directory is not this user's alone.
    """
    os.environ.pop("SLURM_STEP_ID", None)  # a controller's place is no task
    allocation = allocations.read(os.environ)
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while (facts := job_facts(allocation)).state is JobState.RUNNING and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if facts.cut_short != BATCH_KILLED or facts.restarts != allocation.restarts:
        return 0
    run_dir = RunDirectory.open(path, shared=True)
    check_own(run_dir.config_file)
    screen = run_dir.output_file(allocation.job_id)
    with contextlib.suppress(OSError):  # that of the task may be gone with srun
        descriptor = os.open(screen, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    loaded = config.load(files=[run_dir.config_file], site=False)
    allocation = dataclasses.replace(allocation, attempt=int(os.environ.get(ATTEMPT_VARIABLE, allocation.attempt)))
    standing = json.loads(os.environ.get(STANDING_VARIABLE, "null"))
    ward = Ward(past=Past(signal.SIGKILL, standing, [signal.SIGTERM]))
    ward.is_orphaned = True
    return Controller(allocation, loaded, run_dir, ward=ward).run() if standing else 0
