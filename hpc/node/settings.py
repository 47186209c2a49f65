"""What an agent is told on its command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from hpc.command import Target, target_of


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The settings of one agent; hpc/node/__main__.py parses them."""

    job: str | None = None
    overrides: Sequence[str] = ()
    command: Sequence[str] = ()
    preload: Sequence[str] = ()
    fork: bool = True
    rendezvous_timeout_s: float = 600.0
    grace_s: float = 30.0
    allow_loopback: bool = False
    warning: signal.Signals = signal.SIGUSR2
    """The signal of slurm.signal: passed on, and no reason for anybody to end."""
    hang_timeout_s: float = 0.0
    """0: nobody looks for workers that hang."""
    slow_after_s: float = 60.0
    """How long a rank has to be slower than the others to be named."""
    output_beats: bool = False
    """What a worker prints is a sign of life, as a beat is."""
    cores_asked: int | None = None
    """Cores that were asked for this task, to warn when it got fewer."""
    code: str | None = None
    """Where a fresh interpreter is started to import a training job from; the worker then goes to HPC_WORKDIR."""

    def target(self) -> Target:
        """What the workers run: the command, else the training core with the job that was named."""
        if self.command:
            return target_of(self.command)
        told = "HPC_CONFIG" in os.environ
        arguments = () if told else (*([self.job] if self.job else []), *self.overrides)
        return Target(kind="module", name="hpc.train", arguments=tuple(arguments))
