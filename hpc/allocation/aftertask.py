"""What slurmstepd runs after each task of the step: nothing, but where an agent was killed the wait for its sentinel.

With proctrack/cgroup Slurm kills all that is left of a step on a node once its tasks have ended there: the sentinel, too,
before it could clear up, and where the job is being cancelled nobody can be sent there any more. This holds that back.
It costs each step a second at its end, since slurmstepd looks only so often whether it is over: so it is left out where
Slurm keeps no step in a control group.
Source: srun(1), --task-epilog; it has 5 s (slurmstepd, _run_script_as_user).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc.errors import RunDirectoryError
from hpc.rundir import write_private

NAME = "after-task"
GROUPS = Path("/proc/self/cgroup")
PRESET = "SLURM_TASK_EPILOG"
IN_A_STEP = "SLURM_TASK_PID"
_SCRIPT = """#!/bin/sh
# Run by slurmstepd after each task of the step. An agent takes its folder away when it ends; after one that was killed its
# sentinel does so, last of all. It is waited for, 4 s at most, since Slurm then kills all that is left of the step here.
# Without the job's mark, or the sentinel would end this as one of the agent's.
[ $# -eq 3 ] || exec env -i PATH=/usr/bin:/bin /bin/sh "$0" "${TMPDIR:-/tmp}" "${HPC_MARK%.*}" "$SLURM_PROCID"
left=40
while [ "$left" -gt 0 ]; do
    for file in "$1"/hpc-*."$2"-*/"task-$3"; do [ -e "$file" ] || exit 0; done
    sleep 0.1
    left=$((left - 1))
done
exit 0
"""


def is_in_group_of_slurm(groups: str) -> bool:
    """Whether a process of a step, by its /proc/PID/cgroup, is in a group by which Slurm ends all of a step at once.

    In version 1 that is one of the freezer: the others limit memory and cores also where Slurm tracks by other means. Source:
    cgroup.conf(5); proc(5), /proc/[pid]/cgroup.
    """
    lines = [line.split(":", 2) for line in groups.splitlines() if line.count(":") >= 2]
    freezer = [path for _, controllers, path in lines if "freezer" in controllers.split(",")]
    unified = [path for _, controllers, path in lines if not controllers]
    return any("/job_" in path and "/step_" in path for path in freezer or unified)


def write(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """The program for srun's --task-epilog, in the attempt's folder; None where the user has one, or it is of no use.

    Also None where it cannot be written.
    """
    if environ.get(PRESET):
        return None
    path = folder / NAME
    try:
        if environ.get(IN_A_STEP) and not is_in_group_of_slurm(GROUPS.read_text("utf-8", "replace")):
            return None
        write_private(path, _SCRIPT)
        path.chmod(0o700)
    except (OSError, RunDirectoryError):
        return None
    return path
