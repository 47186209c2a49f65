"""One task's place in its step, and the ranks of its workers. Pure: no variable is read and no process asked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc.errors import EnvironmentMismatch
from hpc.ranks import RankInfo

LAYOUTS = ("task-per-node", "task-per-gpu")


@dataclass(frozen=True, kw_only=True)
class TaskEnvironment:
    """One task's place in its step, as Slurm tells it."""

    in_step: bool
    """False: no job step (a local run, or the shell of an allocation); this process is alone."""
    job_id: str
    array_index: str | None
    step_id: str
    restart_count: int
    hosts: tuple[str, ...]
    """Of the step, in its order; empty when they cannot be told and MASTER_ADDR is preset."""
    node_rank: int
    task_rank: int
    local_task: int
    tasks: int
    tasks_of_nodes: tuple[int, ...]
    visible_gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them, or "0" to "n-1" when it is unset; empty for none."""
    layout: str
    workers: int
    """Workers that this task starts."""
    master_host: str
    preset_port: int | None
    notes: tuple[str, ...]
    """What a person should know, one line each."""


def rank_infos(task: TaskEnvironment, workers_of_tasks: Sequence[int] | None = None) -> list[RankInfo]:
    """The places of this task's workers.

    `workers_of_tasks`: the workers of every task of the step, by task; None takes all to have as many as this one (nodes
    with other GPU counts become known only when the agents meet).

    Raises:
        EnvironmentMismatch: the counts are not those of this step.
    """
    counts = [task.workers] * task.tasks if workers_of_tasks is None else list(workers_of_tasks)
    if len(counts) != task.tasks or counts[task.task_rank] != task.workers:
        raise EnvironmentMismatch(
            f"{len(counts)} tasks have told their workers, {task.tasks} are in the step; "
            f"this task has {task.workers} workers: start all tasks by one srun, with the same options"
        )
    tasks_here = task.tasks_of_nodes[task.node_rank]
    first_rank = sum(counts[: task.task_rank])
    first_local = task.local_task * task.workers
    return [
        RankInfo(
            rank=first_rank + index,
            local_rank=first_local + index,
            node_rank=task.node_rank,
            world_size=sum(counts),
            local_world_size=tasks_here * task.workers,
            nodes=len(task.tasks_of_nodes),
            device_index=_device_index(task, first_local + index),
        )
        for index in range(task.workers)
    ]


def _device_index(task: TaskEnvironment, local_rank: int) -> int | None:
    """The GPU within the visible ones. One that is visible alone is number 0, whatever the local rank."""
    if not task.visible_gpus:
        return None
    return 0 if len(task.visible_gpus) == 1 else local_rank


def with_workers(task: TaskEnvironment, workers_per_node: int | None) -> TaskEnvironment:
    """The same task with its number of workers."""
    tasks_here = task.tasks_of_nodes[task.node_rank]
    if task.layout not in LAYOUTS:
        raise EnvironmentMismatch(f"layout {task.layout!r} is not known: use one of {', '.join(LAYOUTS)}")
    if task.layout == "task-per-node" or not task.in_step:
        gpus = len(task.visible_gpus) if task.in_step else 0
        return replace(task, workers=workers_per_node or gpus or 1)
    if workers_per_node not in (None, tasks_here):
        raise EnvironmentMismatch(
            f"--workers-per-node={workers_per_node}, but {tasks_here} tasks on this node, one worker each: "
            f"start with --ntasks-per-node={workers_per_node}, or leave --workers-per-node out"
        )
    idle = len(task.visible_gpus) - tasks_here
    notes = task.notes
    if idle > 0:
        notes += (
            f"{len(task.visible_gpus)} GPUs are visible here and the tasks on this node need {tasks_here}: {idle} stay idle",
        )
    return replace(task, workers=1, notes=notes)


def check_device_count(task: TaskEnvironment) -> None:
    """More workers than GPUs would end in invalid device numbers. One GPU of its own for each of several tasks is fine."""
    gpus = len(task.visible_gpus)
    tasks_here = task.tasks_of_nodes[task.node_rank]
    workers = tasks_here * task.workers
    if workers > gpus > (1 if tasks_here > 1 else 0):
        what = f"{tasks_here} tasks" if tasks_here > 1 else f"{task.workers} workers"
        fix = f"--ntasks-per-node={gpus}" if tasks_here > 1 else f"--workers-per-node={gpus}"
        raise EnvironmentMismatch(
            f"{what} on this node, but {gpus} visible GPUs ({','.join(task.visible_gpus)}): use {fix}, "
            f"or ask for {workers} GPUs per node"
        )
