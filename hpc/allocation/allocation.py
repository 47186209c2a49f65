"""What Slurm granted: the batch step's variables, read once.

| variable | meaning here |
|---|---|
| SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID | which job, and which element of an array |
| SLURM_RESTART_COUNT | the attempt; unset in the first one |
| SLURM_JOB_NUM_NODES, SLURM_NNODES | nodes |
| SLURM_GPUS_PER_NODE, SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS | GPUs of each node: as asked for, or as found on this one |
| SLURM_CPUS_PER_TASK, SLURM_JOB_CPUS_PER_NODE | cores |
| SLURM_JOB_NODELIST | the nodes by name |
| SLURM_JOB_END_TIME | when the time limit is reached, in seconds since 1970 |
| SLURM_STEP_ID | set inside an srun task, where no controller may run |

Source: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.errors import EnvironmentMismatch
from hpc.slurm.nodelist import parse_tasks_per_node

SPECIAL_STEP = 0xFFFFFFF0  # batch, interactive and extern steps have ids from here on: slurm.h


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One job's allocation, or this machine alone when `job_id` is empty."""

    job_id: str = ""
    array_job_id: str | None = None
    array_index: str | None = None
    attempt: int = 0
    """Counted over all jobs of a run; of the first one it is the number of restarts."""
    restarts: int = 0
    """How often Slurm has begun this job anew."""
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_node: int | None = None
    """The smallest number over all nodes."""
    node_list: str = ""
    """In Slurm's notation."""
    end_time: float | None = None
    """When the time limit is reached, in seconds since 1970."""

    @property
    def run_id(self) -> str:
        """What a run directory of this job is called by: the job id, or the array's with the index."""
        return f"{self.array_job_id}_{self.array_index}" if self.array_index is not None else self.job_id


LOCAL = Allocation()


def read(environ: Mapping[str, str]) -> Allocation:
    """The allocation that this batch step (or salloc's shell) runs in; `LOCAL` outside of any.

    Raises:
        EnvironmentMismatch: inside an srun task, in a heterogeneous job, or a value that is no number.
    """
    job_id = _id(environ, "SLURM_JOB_ID") or _id(environ, "SLURM_JOBID")
    if not job_id:
        return LOCAL
    step = environ.get("SLURM_STEP_ID", "")
    if re.fullmatch("[0-9]{1,10}", step) and int(step) < SPECIAL_STEP:
        raise EnvironmentMismatch(
            f"SLURM_STEP_ID={step}: hpc.launch starts the tasks itself, with srun, and cannot run inside one; "
            f"start it from the batch script or salloc's shell, or use `srun python -m hpc.node`"
        )
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise EnvironmentMismatch(
            f"SLURM_HET_SIZE={environ['SLURM_HET_SIZE'][:80]}: heterogeneous jobs are not supported; submit one kind of node"
        )
    cores = environ.get("SLURM_JOB_CPUS_PER_NODE")
    end = environ.get("SLURM_JOB_END_TIME", "")
    return Allocation(
        job_id=job_id,
        array_job_id=_id(environ, "SLURM_ARRAY_JOB_ID"),
        array_index=_id(environ, "SLURM_ARRAY_TASK_ID"),
        attempt=_number(environ, "SLURM_RESTART_COUNT") or 0,
        restarts=_number(environ, "SLURM_RESTART_COUNT") or 0,
        nodes=_number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or 1,
        gpus_per_node=_gpus(environ),
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
        cpus_per_node=min(parse_tasks_per_node(cores)) if cores else None,
        node_list=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or "",
        end_time=float(end) if re.fullmatch("[0-9]{1,12}", end) and int(end) else None,
    )


def _id(environ: Mapping[str, str], name: str) -> str | None:
    """A number that becomes part of names and commands, as it was written."""
    text = environ.get(name)
    if text and not re.fullmatch("[0-9]{1,12}", text):
        raise EnvironmentMismatch(f"{name}={text[:80]!r} is not a number; unset it, or submit the job again")
    return text


def _gpus(environ: Mapping[str, str]) -> int | None:
    """GPUs of each node; None when the job has none. "a100:4", "gpu:a100:4" and "4" all mean four."""
    asked = environ.get("SLURM_GPUS_PER_NODE", "")
    counts = re.findall(r"(?:^|[:,])([0-9]{1,9})(?=$|,|\()", asked)
    if counts:
        return sum(int(count) for count in counts) or None
    found = environ.get("SLURM_GPUS_ON_NODE", "")
    if re.fullmatch("[0-9]{1,9}", found) and int(found):
        return int(found)
    listed = [name for name in environ.get("SLURM_JOB_GPUS", "").split(",") if name]
    return len(listed) or None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,9}", text):
        raise EnvironmentMismatch(f"{name}={text[:80]!r} is not a number; unset it, or submit the job again")
    return int(text)
