"""The job step: how many agents, how they are started, and what they are told."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hpc
from hpc import exitcodes
from hpc.allocation.allocation import Allocation
from hpc.config import Loaded
from hpc.errors import EnvironmentMismatch, HpcError, NeverStarted
from hpc.rundir import SECRET_VARIABLE

CONFIG_LIMIT = 96 * 1024  # one string of an environment may have 128 KiB: execve(2), MAX_ARG_STRLEN
_PR_SET_PDEATHSIG = 1  # prctl(2)
_BY_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU")
_MEMORY = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The job step to start: how many tasks of how many cores, and whether srun starts them."""

    nodes: int
    tasks_per_node: int
    workers_per_node: int | None
    """None: each agent counts its node's GPUs."""
    cpus_per_task: int | None
    overcommit: bool
    local: bool
    gpus_per_node: int | None = None
    """To be asked for by node; None: the step gets all of the job's, in the form the job asked for."""

    @property
    def workers(self) -> int:
        """Workers over all nodes, as far as it is known before the agents have counted."""
        return self.nodes * (self.workers_per_node or 1)


def plan_step(allocation: Allocation, loaded: Loaded) -> Step:
    """The job step for this allocation and configuration; pure.

    Raises:
        EnvironmentMismatch: a task for each GPU, but nodes have different numbers of them.
    """
    launch = loaded.config.launch
    local = not allocation.job_id
    workers = launch.workers_per_node or (1 if local else allocation.gpus_per_node) or 1
    tasks = workers if launch.layout == "task-per-gpu" and not local else 1
    here = allocation.gpus_per_node or 0
    if launch.layout == "task-per-gpu" and allocation.gpus not in (None, allocation.nodes * here) and not local:
        raise EnvironmentMismatch(
            f"SLURM_GPUS={allocation.gpus} on {allocation.nodes} nodes, {here} of them on this one: layout task-per-gpu needs the "
            f"same number on each; ask with --gpus-per-node, or use launch.layout=task-per-node"
        )
    cores = allocation.cpus_per_task if tasks > 1 or allocation.cpus_per_node is None else None
    if cores is None and allocation.cpus_per_node is not None:
        cores = max(1, allocation.cpus_per_node // tasks)
    return Step(
        nodes=allocation.nodes,
        tasks_per_node=tasks,
        # when GPUs were granted, each agent counts those of its own node: nodes may differ
        workers_per_node=workers if launch.workers_per_node or not allocation.gpus_per_node else None,
        cpus_per_task=cores,
        overcommit=allocation.cpus_per_node is not None and tasks > allocation.cpus_per_node,
        local=local,
        gpus_per_node=allocation.gpus_per_node if allocation.gpus_by_task else None,
    )


def agent_command(step: Step, loaded: Loaded, python: str) -> list[str]:
    """The command line of one agent."""
    launch = loaded.config.launch
    command = [python, "-u", "-m", "hpc.node", f"--layout={launch.layout}"]
    if step.tasks_per_node == 1 and step.workers_per_node is not None:
        command.append(f"--workers-per-node={step.workers_per_node}")
    if step.cpus_per_task is not None:
        command.append(f"--cores-asked={step.cpus_per_task}")
    command.append(f"--rendezvous-timeout={launch.rendezvous_timeout_s:g}")
    command.append(f"--grace={launch.grace_s:g}")
    if launch.hang_timeout_s > 0:
        command.append(f"--hang-timeout={launch.hang_timeout_s:g}")
    command.append(f"--slow-after={launch.slow_after_s:g}")
    if launch.output_beats:
        command.append("--output-beats")
    command.append(f"--warning={loaded.config.slurm.signal}")
    command += [f"--preload={name}" for name in launch.preload]
    if not launch.fork:
        command.append("--no-fork")
    if launch.allow_loopback:
        command.append("--allow-loopback")
    if loaded.config.command:
        return [*command, "--", *loaded.config.command]
    return [*command, loaded.config.job]


def step_command(step: Step, agent: Sequence[str], after_task: Path | None = None) -> list[str]:
    """The agents as one job step. GPUs are not named, but where the job asked for them by task: else it gets all of the job's.

    Source: srun(1): --kill-on-bad-exit, --input, --cpus-per-task (not inherited from sbatch since 22.05), --export.
    """
    if step.local:
        return list(agent)
    command = [
        "srun",
        f"--nodes={step.nodes}",
        f"--ntasks={step.nodes * step.tasks_per_node}",
        f"--ntasks-per-node={step.tasks_per_node}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--label",
        "--input=all",
        "--export=ALL",
    ]
    if step.cpus_per_task is not None:
        command.append(f"--cpus-per-task={step.cpus_per_task}")
    if step.overcommit:
        command.append("--overcommit")
    if after_task is not None:
        command.append(f"--task-epilog={after_task}")
    if step.gpus_per_node is not None:
        command.append(f"--gpus-per-node={step.gpus_per_node}")
    return [*command, *agent]


def new_secret() -> str:
    """What only the agents of one start know."""
    return secrets.token_hex(16)


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the requests in it that are not this step's, or that srun would refuse beside each other.

    How many GPUs each task of the job was to have, or all of them where each node's number is there; cores and memory by
    number, as an outer step had them; and the memory, when it is there in two forms: the step gets the job's in any case.
    Source: srun(1), "INPUT ENVIRONMENT VARIABLES"; seen with 22.05.8: all of these reach a job that is sent from inside
    another one, and "SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive".
    """
    gone = set(_BY_TASK) | ({"SLURM_GPUS"} if environ.get("SLURM_GPUS_PER_NODE") else set())
    for kind in ("CPU", "MEM"):
        if re.search("mask|map", environ.get(f"SLURM_{kind}_BIND", "")):
            gone |= {name for name in environ if name.startswith(f"SLURM_{kind}_BIND")}
    if sum(name in environ for name in _MEMORY) > 1:
        gone |= set(_MEMORY)
    return {name: text for name, text in environ.items() if name not in gone}


def agent_environ(step: Step, loaded: Loaded, told: Mapping[str, str]) -> dict[str, str]:
    """The agents' environment: this one, what the controller tells them, a secret of this start, and the configuration.

    Raises:
        HpcError: the configuration is too long to be handed on.
    """
    environ = {
        **(os.environ if step.local else for_srun(os.environ)),
        SECRET_VARIABLE: new_secret(),
        **told,
        "PYTHONUTF8": "1",
    }
    root = str(Path(hpc.__file__).resolve().parent.parent)
    if Path(root).name not in ("site-packages", "dist-packages"):
        before = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else root
    if step.local and sys.stdout.isatty():
        environ["HPC_TERMINAL"] = "1"
    if not loaded.config.command:
        text = loaded.to_yaml()
        if len(text.encode()) > CONFIG_LIMIT:
            raise HpcError(
                f"the merged configuration has {len(text)} characters; at most {CONFIG_LIMIT} can be handed on"
            )
        environ["HPC_CONFIG"] = text
    return environ


def start_step(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: str | None,
    local: bool,
    piped: bool = False,
    told: bool = False,
    guarded: bool = False,
) -> subprocess.Popen[bytes]:
    """Start srun, or the agent itself when `local`; it ends when this process dies, however it dies.

    `piped`: this process writes its standard input and reads its standard output; `told`: it only writes. `guarded`: a
    warden ends it, unless that has died as well: then Slurm ends the job, and the agents get its grace.

    Raises:
        NeverStarted: it is missing or may not be executed.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        # srun takes SIGTERM for an order to end the step by force; the agent knows SIGHUP from a lost launcher
        if not guarded:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP if local else signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(exitcodes.UNAVAILABLE)
        if local:
            os.setpgid(0, 0)  # Ctrl-C reaches the agent once, through the controller

    try:
        stdin = subprocess.PIPE if piped or told else subprocess.DEVNULL
        stdout = subprocess.PIPE if piped else None
        return subprocess.Popen(argv, env=dict(environ), cwd=cwd, stdin=stdin, stdout=stdout, preexec_fn=in_child)
    except OSError as error:
        raise NeverStarted(
            f"cannot run {argv[0]}: {error.strerror}; "
            f"is Slurm's client on PATH in the batch step? ({os.environ.get('PATH')})"
        ) from None
