"""After an attempt: every node of the allocation is looked over for what the attempt has left, by its mark."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence

from hpc.allocation.allocation import Allocation
from hpc.errors import SlurmCommandError
from hpc.rundir import MARK_VARIABLE, RESTART_VARIABLE, SECRET_VARIABLE
from hpc.slurm import commands

LIMIT_S = 20.0
"""For all nodes together; 5 s when the allocation is being taken away."""
_SECRETS = (MARK_VARIABLE, RESTART_VARIABLE, SECRET_VARIABLE)
_ENDING = re.compile(r"expired|completing|completed|invalid job", re.IGNORECASE)


def new_mark(allocation: Allocation, restart: int) -> str:
    """HPC_MARK of one start of the step: what it starts, on whatever node, carries it in its environment."""
    job = f"{allocation.job_id}.{allocation.restarts}" if allocation.job_id else f"local.{os.getpid()}"
    return f"{job}.{restart}.{secrets.token_hex(8)}"


def sweep(
    allocation: Allocation,
    mark: str,
    *,
    python: str,
    environ: Mapping[str, str],
    without: Sequence[str],
    limit_s: float = LIMIT_S,
) -> list[str]:
    """End on each node what the start with this mark has left; what was found there, as lines for a person.

    Nodes that are lost (`without`) are left out. Once Slurm takes the allocation away it starts nothing on other nodes
    any more; then only this one is swept, and the agents and their sentinels have done the others.
    """
    command = [python, "-m", "hpc.clean", "--end", "--yes", "--quiet", f"--over={mark}"]
    command += ["--as-root"] if os.getuid() == 0 else []
    env = {name: text for name, text in environ.items() if name not in _SECRETS}
    nodes = allocation.nodes - len(without)
    on_a_node = "SLURMD_NODENAME" in os.environ
    if nodes > 1 or not on_a_node:
        try:
            answer = commands.on_every_node(
                allocation.job_id, nodes, command, without=without, timeout_s=limit_s, environ=env
            )
        except SlurmCommandError as error:
            return [f"the nodes were not swept: {error}"]
        if answer.returncode == 0:
            return _lines(answer.stdout)
        if not _ENDING.search(answer.stderr):
            return _lines(answer.stdout) or [f"the nodes were not swept: {answer.complaint}"]
    return _here(command, env, limit_s) if on_a_node else []


def _here(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> list[str]:
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"this node was not swept: {error}"]
    return _lines(done.stdout.decode("utf-8", "backslashreplace"))


def _lines(text: str) -> list[str]:
    """Without srun's numbers of tasks."""
    return [re.sub(r"^ *[0-9]+: ", "", line) for line in text.splitlines() if line.strip()]
