"""What slurmstepd runs after each task of the step: nothing, but where an agent was killed the wait for its sentinel.

With proctrack/cgroup Slurm kills all that is left of a step on a node once its tasks have ended there: the sentinel, too,
before it could clear up, and where the job is being cancelled nobody can be sent there any more. This holds that back.
Source: srun(1), --task-epilog; it has 5 s (slurmstepd, _run_script_as_user).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc.errors import RunDirectoryError
from hpc.rundir import write_private

NAME = "after-task"
PRESET = "SLURM_TASK_EPILOG"
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


def write(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """The program for srun's --task-epilog, in the attempt's folder; None where the user has one, or where it cannot be."""
    if environ.get(PRESET):
        return None
    path = folder / NAME
    try:
        write_private(path, _SCRIPT)
        path.chmod(0o700)
    except (OSError, RunDirectoryError):
        return None
    return path
