"""What Slurm granted: the batch step's variables, read once.

sbatch hands on the environment that it is called in, and Slurm sets over it only what the new job has: of a job that was
sent from inside another one, some variables tell of that other one. Such are passed over here and in the step's request.

| variable | meaning here |
|---|---|
| SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID | which job, and which element of an array |
| SLURM_RESTART_COUNT | the attempt; unset in the first one |
| SLURM_JOB_NUM_NODES, SLURM_NNODES | nodes |
| SLURM_GPUS_PER_NODE, SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS | GPUs of each node: as asked for, or as found on this one |
| SLURM_CPUS_PER_TASK, SLURM_JOB_CPUS_PER_NODE | cores |
| SLURM_JOB_NODELIST | the nodes by name |
| SLURM_JOB_END_TIME | when the time limit is reached, in seconds since 1970 |
| SLURM_GPUS | GPUs of the whole job, if they were asked for so |
| SLURM_GPUS_PER_TASK, SLURM_TRES_PER_TASK | GPUs were asked for by task |
| SLURM_TASKS_PER_NODE | then: the tasks of each node |
| SLURM_STEP_ID | set inside an srun task, where no controller may run |

Source: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc.errors import EnvironmentMismatch, SlurmCommandError
from hpc.slurm import commands
from hpc.slurm.nodelist import parse_tasks_per_node

SPECIAL_STEP = 0xFFFFFFF0  # batch, interactive and extern steps have ids from here on: slurm.h
_STEPD = re.compile(rb"slurmstepd: \[([0-9]+)(?:\+[0-9]+)?\.([a-z]+|[0-9]+)")
_GENERATIONS = 64
_WHOLE_ANSWER = frozenset(["JobId", "UserId", "SubmitTime", "NumNodes", "BatchFlag"])


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
    gpus: int | None = None
    """Of all nodes together, where that was asked for; then nodes may have different numbers."""
    gpus_by_task: bool = False
    """They were asked for by task, and a step of fewer tasks gets fewer, unless it asks by node."""
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


def here() -> Allocation:
    """The allocation of this process. Where variables tell of an array or of a restart, Slurm is asked whether it is this
    job's; what is another job's is taken out of this process's environment, too.

    Raises:
        EnvironmentMismatch: as `read`.
    """
    allocation = read(os.environ)
    if allocation.array_index is None and not allocation.restarts:
        return allocation
    with contextlib.suppress(SlurmCommandError):
        fields = commands.show_job(allocation.job_id)
        true = confirmed(allocation, fields)
        if true.array_index != allocation.array_index:
            for name in [name for name in os.environ if name.startswith("SLURM_ARRAY_")]:
                del os.environ[name]
        if true.restarts != allocation.restarts:
            os.environ["SLURM_RESTART_COUNT"] = str(true.restarts)
        return true
    return allocation


def confirmed(allocation: Allocation, fields: Mapping[str, str]) -> Allocation:
    """The allocation, without what `scontrol show job` tells otherwise; an answer that is not whole changes nothing. Pure."""
    if not fields.keys() >= _WHOLE_ANSWER or fields["JobId"] != allocation.job_id:
        return allocation
    if "ArrayTaskId" not in fields:
        allocation = replace(allocation, array_job_id=None, array_index=None)
    restarts = fields.get("Restarts", "")
    if restarts.isdecimal() and int(restarts) != allocation.restarts:
        allocation = replace(allocation, attempt=int(restarts), restarts=int(restarts))
    return allocation


def is_task(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a job step, as against a batch script or a shell that has inherited SLURM_STEP_ID."""
    step = environ.get("SLURM_STEP_ID", "")
    if not re.fullmatch("[0-9]{1,10}", step) or int(step) >= SPECIAL_STEP:
        return False
    told = _told_by_slurmstepd()
    if told is None:
        return True
    job, step = told
    return (
        job == (environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID"))
        and step.isdecimal()
        and int(step) < SPECIAL_STEP
    )


def _told_by_slurmstepd() -> tuple[str, str] | None:
    """The job and the step ("0", "batch", "interactive") in the title of the slurmstepd above this process; None for none.

    Source: seen with 22.05.8, "slurmstepd: [270.batch]"; proc(5), /proc/PID/cmdline and stat.
    """
    pid = os.getpid()
    for _ in range(_GENERATIONS):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
        if match := _STEPD.match(title):
            return match[1].decode(), match[2].decode()
        if pid <= 1:
            return None
    return None


def read(environ: Mapping[str, str]) -> Allocation:
    """The allocation that this batch step (or salloc's shell) runs in; `LOCAL` outside of any.

    Raises:
        EnvironmentMismatch: inside an srun task, in a heterogeneous job, a value that is no number, or GPUs that were asked
            for by task with another number of tasks on each node.
    """
    job_id = _id(environ, "SLURM_JOB_ID") or _id(environ, "SLURM_JOBID")
    if not job_id:
        return LOCAL
    if is_task(environ):
        raise EnvironmentMismatch(
            f"SLURM_STEP_ID={environ['SLURM_STEP_ID']}: hpc.launch starts the tasks itself, with srun, and cannot run inside one; "
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
        gpus=None if environ.get("SLURM_GPUS_PER_NODE") else _count(environ.get("SLURM_GPUS", "")),
        gpus_by_task=_by_task(environ),
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
    if _count(asked) is not None:
        return _count(asked) or None
    found = environ.get("SLURM_GPUS_ON_NODE", "")
    if re.fullmatch("[0-9]{1,9}", found) and int(found):
        return int(found)
    listed = [name for name in environ.get("SLURM_JOB_GPUS", "").split(",") if name]
    return len(listed) or None


def _count(asked: str) -> int | None:
    """All GPUs of a request, "4" or "a100:2,v100:2"; None when it names no number."""
    counts = re.findall(r"(?:^|[:,])([0-9]{1,9})(?=$|,|\()", asked)
    return sum(int(count) for count in counts) if counts else None


def _by_task(environ: Mapping[str, str]) -> bool:
    asked = [name for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK") if environ.get(name)]
    if not asked or (asked == ["SLURM_TRES_PER_TASK"] and "gpu" not in environ[asked[0]]):
        return False
    tasks = environ.get("SLURM_TASKS_PER_NODE", "")
    if not environ.get("SLURM_GPUS_PER_NODE") and tasks and len(set(parse_tasks_per_node(tasks))) > 1:
        raise EnvironmentMismatch(
            f"GPUs were asked for by task ({asked[0]}={environ[asked[0]][:80]}) with SLURM_TASKS_PER_NODE={tasks[:80]}, so "
            f"the nodes have different numbers of them: ask by node, --gpus-per-node=N"
        )
    return True


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,9}", text):
        raise EnvironmentMismatch(f"{name}={text[:80]!r} is not a number; unset it, or submit the job again")
    return int(text)
