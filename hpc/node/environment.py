"""From the variables of one Slurm task to the ranks of its workers: the only reader of a task's SLURM_* variables.

Everything is decided here before any other process is asked: what contradicts itself is refused with both values.
The variables and what they mean are the table below; where two rows tell the same, the upper one counts, because inside a
step the job's variables may describe something larger (seen on Slurm 22.05: a step of 2 tasks on one node still has
SLURM_NTASKS_PER_NODE=4 and the whole job's SLURM_NODELIST).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from hpc.errors import EnvironmentMismatch, NodelistError
from hpc.node.placement import TaskEnvironment as TaskEnvironment
from hpc.node.placement import check_device_count, with_workers
from hpc.node.placement import rank_infos as rank_infos
from hpc.slurm.nodelist import expand_nodelist, parse_tasks_per_node

VARIABLES = {
    "SLURM_STEP_ID": "set in a job step; from 0xfffffff0 on it is the batch script, salloc's shell or the extern step",
    "SLURM_PROCID": "this task among the tasks of the step; in a batch script it is 0 and means nothing",
    "SLURM_LOCALID": "this task among those of its node",
    "SLURM_NODEID": "this node among those of the step",
    "SLURM_STEP_NUM_TASKS": "tasks of the step",
    "SLURM_NTASKS": "the same; in a batch script those of the job",
    "SLURM_NPROCS": "its old name",
    "SLURM_STEP_NUM_NODES": "nodes of the step",
    "SLURM_NNODES": "the same; in a batch script those of the job",
    "SLURM_JOB_NUM_NODES": "nodes of the job",
    "SLURM_STEP_TASKS_PER_NODE": "tasks on each node of the step, like 2(x3),1",
    "SLURM_TASKS_PER_NODE": "the same; in a batch script those of the job",
    "SLURM_NTASKS_PER_NODE": "what the job asked for with --ntasks-per-node, if it did",
    "SLURM_STEP_NODELIST": "hosts of the step",
    "SLURM_JOB_NODELIST": "hosts of the job",
    "SLURM_NODELIST": "its old name",
    "SLURM_DISTRIBUTION": "how srun numbered the tasks: block, cyclic, arbitrary",
    "SLURM_JOB_ID": "the job",
    "SLURM_ARRAY_TASK_ID": "which element of an array",
    "SLURM_RESTART_COUNT": "how often the job came back; unset in the first attempt",
    "SLURM_HET_SIZE": "components of a heterogeneous job",
    "SLURM_GPUS_ON_NODE": "GPUs of the step on this node",
    "SLURM_STEP_GPUS": "their numbers on the node",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this task may use, as CUDA reads it; never changed here",
    "MASTER_ADDR, MASTER_PORT": "preset by the user: kept",
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE": "preset by somebody: they must agree",
}
"""Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", and trials on Slurm 22.05.8."""

FIRST_SPECIAL_STEP = 0xFFFFFFF0
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:%-]{0,254}|::[A-Fa-f0-9:.]*")


def read(
    environ: Mapping[str, str],
    *,
    workers_per_node: int | None = None,
    layout: str | None = None,
    controlled: bool = False,
) -> TaskEnvironment:
    """This task's place.

    `workers_per_node` and `layout` are what the user asked for; None follows from the tasks and GPUs. `controlled`: a
    controller of ours started this task, so SLURM_PROCID is enough to know that it is in a step.

    Raises:
        EnvironmentMismatch: variables contradict each other or the request, or one that is needed is missing.
        NodelistError: the host list cannot be read, and MASTER_ADDR is not preset.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        raise EnvironmentMismatch(
            f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']} is set: this process is a worker of torchrun or "
            f"hpc.node already, and cannot start workers of its own; use one launcher: srun python -m hpc.node -- train.py"
        )
    if is_in_step(environ, controlled=controlled):
        task = _read_step(environ, layout)
    else:
        task = _alone(environ, layout)
    task = with_workers(task, workers_per_node)
    check_device_count(task)
    notes = (*task.notes, *_gpu_notes(environ, task), *_check_presets(environ, task))
    return replace(task, preset_port=_preset_port(environ), notes=notes)


def is_in_step(environ: Mapping[str, str], *, controlled: bool = False) -> bool:
    """Whether this process is a task of a job step, as against a batch script, salloc's shell, or no job at all.

    The job's name says nothing about it: in `salloc` every step's job is called "interactive".
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if step.isdecimal() and int(step) < FIRST_SPECIAL_STEP:
        return True
    return controlled and bool(environ.get("SLURM_PROCID"))


# ---- where this task is ----------------------------------------------------------------------------------------------


def _alone(environ: Mapping[str, str], layout: str | None) -> TaskEnvironment:
    notes = []
    job_id = _job_id(environ)
    if job_id:
        tasks = environ.get("SLURM_NTASKS") or environ.get("SLURM_NPROCS") or "?"
        notes.append(
            f"SLURM_JOB_ID={job_id} but no job step (SLURM_STEP_ID): this process runs alone, with world size 1 unless "
            f"--workers-per-node says more; SLURM_NTASKS={tasks} of the allocation is ignored, `srun` starts its tasks"
        )
    return TaskEnvironment(
        in_step=False,
        job_id="",
        array_index=None,
        step_id="",
        restart_count=0,
        hosts=("localhost",),
        node_rank=0,
        task_rank=0,
        local_task=0,
        tasks=1,
        tasks_of_nodes=(1,),
        visible_gpus=_visible_gpus(environ, in_step=False),
        layout=layout or "task-per-node",
        workers=1,
        master_host=_preset_host(environ) or "127.0.0.1",
        preset_port=None,
        notes=tuple(notes),
    )


def _read_step(environ: Mapping[str, str], layout: str | None) -> TaskEnvironment:
    _refuse_unsupported(environ)
    tasks_of_nodes = _tasks_of_nodes(environ)
    tasks, nodes = sum(tasks_of_nodes), len(tasks_of_nodes)
    task_rank = _place(environ, "SLURM_PROCID", tasks, "tasks")
    node_rank = _place(environ, "SLURM_NODEID", nodes, "nodes")
    local_task = _place(environ, "SLURM_LOCALID", tasks_of_nodes[node_rank], "tasks on this node")
    first = sum(tasks_of_nodes[:node_rank])
    if environ.get("SLURM_DISTRIBUTION", "").startswith("block") and task_rank != first + local_task:
        raise EnvironmentMismatch(
            f"SLURM_PROCID={task_rank} on SLURM_NODEID={node_rank} with SLURM_LOCALID={local_task}: the nodes before it "
            f"have {first} tasks, so {first + local_task} was needed; start all tasks by one srun"
        )
    hosts, notes = _hosts(environ, nodes)
    several = max(tasks_of_nodes) > 1
    if layout == "task-per-node" and several:
        raise EnvironmentMismatch(
            f"layout task-per-node, but {max(tasks_of_nodes)} tasks on a node: start with --ntasks-per-node=1, "
            f"or use --layout=task-per-gpu"
        )
    master = _preset_host(environ) or ("127.0.0.1" if nodes == 1 else hosts[0])
    return TaskEnvironment(
        in_step=True,
        job_id=_job_id(environ),
        array_index=environ.get("SLURM_ARRAY_TASK_ID") or None,
        step_id=environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or "",
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        hosts=hosts,
        node_rank=node_rank,
        task_rank=task_rank,
        local_task=local_task,
        tasks=tasks,
        tasks_of_nodes=tasks_of_nodes,
        visible_gpus=_visible_gpus(environ, in_step=True),
        layout=layout or ("task-per-gpu" if several else "task-per-node"),
        workers=1,
        master_host=master,
        preset_port=None,
        notes=notes,
    )


def _refuse_unsupported(environ: Mapping[str, str]) -> None:
    het = environ.get("SLURM_HET_SIZE") or environ.get("SLURM_PACK_SIZE") or "1"
    step_told = all(f"SLURM_STEP_{name}" in environ for name in ("NUM_TASKS", "TASKS_PER_NODE", "NODELIST"))
    if het != "1" and not step_told:
        raise EnvironmentMismatch(
            f"SLURM_HET_SIZE={het} and no SLURM_STEP_* variables for this step: heterogeneous jobs are not supported "
            f"without them; submit one kind of node, or one srun per component"
        )
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") and not _preset_host(environ):
        raise EnvironmentMismatch(
            "SLURM_DISTRIBUTION=arbitrary: the node of task 0 cannot be told from the host list; "
            "use srun --distribution=block, or set MASTER_ADDR to task 0's host"
        )


def _tasks_of_nodes(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Tasks on each node of the step. The step's variables count alone where they are set; the job's must agree."""
    tasks, tasks_name = _first_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    nodes, nodes_name = _first_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    listed: list[int] | None = None
    listed_name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if environ.get(n)), "")
    if listed_name:
        listed = parse_tasks_per_node(environ[listed_name], listed_name)
    if listed_name == "SLURM_TASKS_PER_NODE" and tasks_name.startswith("SLURM_STEP_") and sum(listed or []) != tasks:
        listed = None  # the job's, and the step is smaller
    told_by_step = tasks_name.startswith("SLURM_STEP_") or listed_name.startswith("SLURM_STEP_")
    if nodes is None:
        nodes, nodes_name = (len(listed), listed_name) if listed else _nodes_by_hosts(environ, tasks)
    if listed is None:
        listed = _spread(tasks, nodes, per_node, told_by_step)
    if 0 in listed:
        raise EnvironmentMismatch(f"{listed_name}={environ[listed_name]}: a node of a step has at least one task")
    if len(listed) != nodes:
        raise EnvironmentMismatch(
            f"{nodes_name}={nodes}, but {listed_name}={environ[listed_name]} has {len(listed)} nodes: "
            f"start the tasks by srun and leave these variables as it sets them"
        )
    if tasks not in (None, sum(listed)) or (not told_by_step and per_node not in (None, max(listed))):
        facts = [f"{tasks_name}={tasks}"] if tasks_name else []
        facts.append(f"{nodes_name}={nodes}")
        facts += [f"SLURM_NTASKS_PER_NODE={per_node}"] if per_node is not None and not told_by_step else []
        facts += [f"{listed_name}={environ[listed_name]}"] if listed_name else []
        raise EnvironmentMismatch(
            f"{', '.join(facts)} contradict each other: submit with --nodes and --ntasks-per-node "
            f"(hpc.submit: --gpus-per-node) and leave --ntasks out"
        )
    return tuple(listed)


def _spread(tasks: int | None, nodes: int, per_node: int | None, told_by_step: bool) -> list[int]:
    """Tasks per node when no list of them is set."""
    if per_node is not None and not told_by_step:
        return [per_node] * nodes
    if tasks is None:
        raise EnvironmentMismatch(
            "SLURM_NTASKS is not set, nor any count of tasks per node: add `#SBATCH --ntasks-per-node=1` to the job, "
            "or start with srun --ntasks-per-node=1"
        )
    if tasks < nodes or tasks % nodes:
        raise EnvironmentMismatch(
            f"{tasks} tasks on {nodes} nodes, and SLURM_TASKS_PER_NODE is not set to say how many on which: "
            f"add `#SBATCH --ntasks-per-node=1` to the job"
        )
    return [tasks // nodes] * nodes


def _nodes_by_hosts(environ: Mapping[str, str], tasks: int | None) -> tuple[int, str]:
    """The number of nodes when no variable tells it."""
    name = _hosts_variable(environ)
    if name:
        return max(1, len(expand_nodelist(environ[name]))), name
    if tasks == 1:
        return 1, "nodes"
    raise EnvironmentMismatch(
        "SLURM_NNODES is not set, nor a host list: start the tasks with srun, or export SLURM_NNODES=<nodes of the step>"
    )


def _hosts_variable(environ: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((name for name in names if environ.get(name)), "")


def _hosts(environ: Mapping[str, str], nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts of the step and notes; no hosts when they cannot be told but MASTER_ADDR makes them unnecessary."""
    name = _hosts_variable(environ)
    try:
        if environ.get("SLURM_JOB_NODELIST") not in (None, "", environ.get(name)):
            expand_nodelist(environ["SLURM_JOB_NODELIST"])  # a list that nobody can read is not passed over
        hosts = expand_nodelist(environ[name]) if name else []
        odd = next((host for host in hosts if not _HOST.fullmatch(host)), None)
        if odd is not None:
            raise NodelistError(f"{name}: {odd!r} is no name of a host; set MASTER_ADDR to rank zero's host by hand")
        if not name and nodes == 1:
            hosts = ["localhost"]
        if not hosts:
            raise EnvironmentMismatch(
                f"{nodes} nodes and no host list (SLURM_STEP_NODELIST, SLURM_JOB_NODELIST): start the tasks with srun, "
                f"or set MASTER_ADDR to rank zero's host by hand"
            )
        if len(hosts) != nodes:
            raise EnvironmentMismatch(
                f"{name}={environ[name]} names {len(hosts)} hosts for {nodes} nodes: start the tasks with srun, "
                f"or set MASTER_ADDR to rank zero's host by hand"
            )
    except EnvironmentMismatch as error:
        preset = _preset_host(environ)
        if preset is None:
            raise
        return (), (f"MASTER_ADDR={preset} is preset, so the run goes on without a host list: {error}",)
    return tuple(hosts), ()


def _place(environ: Mapping[str, str], name: str, count: int, of_what: str) -> int:
    number = _number(environ, name)
    if number is None:
        if count == 1:
            return 0
        raise EnvironmentMismatch(f"{name} is not set, but there are {count} {of_what}: start the tasks with srun")
    if number >= count:
        raise EnvironmentMismatch(
            f"{name}={number}, but there are {count} {of_what} (0 to {count - 1}): start the tasks with srun and leave "
            f"its variables as they are"
        )
    return number


# ---- workers and GPUs ------------------------------------------------------------------------------------------------


def _visible_gpus(environ: Mapping[str, str], *, in_step: bool) -> tuple[str, ...]:
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        entries: list[str] = []
        for entry in text.split(","):
            if entry.strip() in ("", "-1", "NoDevFiles"):  # CUDA stops there; Slurm writes the word for "none"
                break
            entries.append(entry.strip())
        return tuple(entries)
    if not in_step:
        return ()
    count = _gpus_on_node(environ)
    if count is None:
        count = len([number for number in environ.get("SLURM_STEP_GPUS", "").split(",") if number])
    return tuple(str(index) for index in range(count))


def _gpus_on_node(environ: Mapping[str, str]) -> int | None:
    """ "4", or with a type "a100:4"; None when it is not told."""
    match = re.fullmatch(r"(?:.*:)?([0-9]{1,6})", environ.get("SLURM_GPUS_ON_NODE", ""))
    return int(match[1]) if match else None


def _gpu_notes(environ: Mapping[str, str], task: TaskEnvironment) -> list[str]:
    if not task.in_step:
        return []
    visible, tasks_here = len(task.visible_gpus), task.tasks_of_nodes[task.node_rank]
    on_node = _gpus_on_node(environ)
    if visible == 1 and tasks_here > 1:
        notes = [
            f"one GPU ({task.visible_gpus[0]}) is visible to this task, {tasks_here} tasks are on the node: device index 0 "
            f"is used, whatever the local rank",
            "warning: NCCL has no direct path between GPUs that their tasks cannot see: ask with --gpus-per-node, "
            "without --gpus-per-task or --gpu-bind",
        ]
        if on_node is not None and on_node < tasks_here:
            notes.append(
                f"warning: SLURM_GPUS_ON_NODE={on_node} for {tasks_here} tasks: some share a GPU, which NCCL refuses"
            )
        return notes
    if on_node is not None and on_node != visible:
        value = environ.get("CUDA_VISIBLE_DEVICES", "")
        return [
            f"CUDA_VISIBLE_DEVICES={value} names {visible} GPUs, SLURM_GPUS_ON_NODE={on_node}: the former is used as it is; "
            f"unset it in the job's script if it was set by hand"
        ]
    return []


# ---- what the user or somebody else preset ---------------------------------------------------------------------------


def _check_presets(environ: Mapping[str, str], task: TaskEnvironment) -> list[str]:
    """Refuse RANK and its kin where they differ from the mapping; a note where they describe the task and not its workers.

    Container hooks set RANK=SLURM_PROCID and WORLD_SIZE=SLURM_NTASKS.
    """
    tasks_here = task.tasks_of_nodes[task.node_rank]
    first = rank_infos(task)[0]
    mapped = {
        "RANK": first.rank,
        "WORLD_SIZE": first.world_size,
        "LOCAL_RANK": first.local_rank,
        "LOCAL_WORLD_SIZE": first.local_world_size,
    }
    of_task = {
        "RANK": task.task_rank,
        "WORLD_SIZE": task.tasks,
        "LOCAL_RANK": task.local_task,
        "LOCAL_WORLD_SIZE": tasks_here,
    }
    preset = {name: environ[name] for name in mapped if environ.get(name)}
    if all(value == str(mapped[name]) for name, value in preset.items()) and task.workers == 1:
        return []
    if all(value == str(of_task[name]) for name, value in preset.items()):
        shown = ", ".join(f"{name}={value}" for name, value in preset.items())
        return [f"preset {shown}: they describe this task; its {task.workers} workers get their own"] if preset else []
    for name, value in preset.items():
        if value != str(mapped[name]):
            source = (
                f"SLURM_PROCID={task.task_rank} of {task.tasks} tasks" if task.in_step else "a run without a job step"
            )
            raise EnvironmentMismatch(
                f"{name}={value} is preset, but {source} with {task.workers} workers each gives {name}={mapped[name]}: "
                f"unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or start the worker without hpc.node"
            )
    return []


def _preset_host(environ: Mapping[str, str]) -> str | None:
    host = environ.get("MASTER_ADDR") or None
    if host is not None and not _HOST.fullmatch(host):
        raise EnvironmentMismatch(
            f"MASTER_ADDR={host!r} is neither a name nor an address of a host; unset it, or set it to rank zero's host"
        )
    return host


def _preset_port(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT") or None
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise EnvironmentMismatch(f"MASTER_PORT={text!r} is no port (1 to 65535); unset it, and a free one is found")
    return int(text)


def _job_id(environ: Mapping[str, str]) -> str:
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    if not re.fullmatch("[0-9]{0,12}", job_id):
        raise EnvironmentMismatch(
            f"SLURM_JOB_ID={job_id[:80]!r} is not a number; unset it, or start the tasks with srun"
        )
    return job_id


def _first_number(environ: Mapping[str, str], *names: str) -> tuple[int | None, str]:
    """The first of the variables that is set, and its name."""
    for name in names:
        number = _number(environ, name)
        if number is not None:
            if number == 0:
                raise EnvironmentMismatch(f"{name}=0: at least 1 was needed; start the tasks with srun")
            return number, name
    return None, ""


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise EnvironmentMismatch(f"{name}={text!r} is not a number; unset it, or start the tasks with srun")
    return int(text)
