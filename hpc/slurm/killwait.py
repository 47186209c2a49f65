"""Slurm's own end of a job (scancel, the time limit, the end of a preemption's notice): SIGTERM, KillWait later SIGKILL.

With SIGKILL go all processes that Slurm keeps track of, also those that would have cleared up. So workers get less than
KillWait, and the rest is for their SIGKILL, for what the agents do then, and for the controller's last acts.
Source: slurm.conf(5), KillWait.
"""

from __future__ import annotations

from hpc.errors import SlurmCommandError
from hpc.slurm import commands, site

DEFAULT_S = 30
ANSWER_LIMIT_S = 3.0
"""How long Slurm may take to tell it; its own default counts then."""
KEPT_S = 8.0


def for_workers(kill_wait_s: float) -> float:
    """What the workers get of it: all but 8 s, but half at least."""
    return max(kill_wait_s - KEPT_S, kill_wait_s / 2)


def ask() -> int:
    """KillWait of this cluster, in seconds; Slurm's default where it cannot be asked."""
    try:
        answer = commands.ask("scontrol", ["show", "config"], timeout_s=ANSWER_LIMIT_S)
    except SlurmCommandError:
        return DEFAULT_S
    told = site.seconds(site.parse_config(answer.stdout), "KillWait")
    return DEFAULT_S if told is None else told
