"""Each start of the workers: by a new step, or by the agents of the last one, which stand by."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hpc.allocation import aftertask
from hpc.allocation.allocation import Allocation
from hpc.allocation.running import RunningStep
from hpc.allocation.standby import Listener, is_with_rank_zero
from hpc.allocation.step import Step, agent_command, agent_environ, new_secret, start_step, step_command
from hpc.allocation.sweep import new_mark
from hpc.config import Loaded
from hpc.rundir import (
    ATTEMPT_VARIABLE,
    MARK_VARIABLE,
    RUN_DIR_VARIABLE,
    SECRET_VARIABLE,
    STANDBY_VARIABLE,
    RunDirectory,
)


class Starts:
    """Starts one after the other; between two of them a step may stand by."""

    def __init__(
        self,
        allocation: Allocation,
        loaded: Loaded,
        step: Step,
        python: str,
        *,
        code: str | None,
        guarded: bool = False,
    ) -> None:
        """`guarded`: a warden ends a step whose controller has died."""
        self._guarded = guarded
        self._allocation, self._loaded, self._step, self._python, self._code = allocation, loaded, step, python, code
        self._standing: RunningStep | None = None
        self.mark = ""
        """HPC_MARK of the present step."""

    def begin(
        self, restart: int, told: Mapping[str, str], *, batch_job: str | None, on_end: Callable[[], None]
    ) -> RunningStep:
        """The running step, told these variables; `batch_job` and `on_end` as in RunningStep.

        Raises:
            NeverStarted: srun is missing or may not be executed.
            HpcError: the configuration is too long to be handed on.
        """
        standing, self._standing = self._standing, None
        if standing is not None:
            if standing.again({**told, MARK_VARIABLE: self.mark, SECRET_VARIABLE: new_secret()}):
                return standing
            _end(standing)
        self.mark = new_mark(self._allocation, restart)
        told = {**told, MARK_VARIABLE: self.mark}
        listener = None
        if is_with_rank_zero(self._allocation, os.environ.get("SLURMD_NODENAME")):
            listener = Listener()
            told[STANDBY_VARIABLE] = listener.name
        run_dir = RunDirectory(Path(told[RUN_DIR_VARIABLE]))
        after = (
            aftertask.write(run_dir.attempt(int(told[ATTEMPT_VARIABLE])), os.environ) if not self._step.local else None
        )
        argv = step_command(self._step, agent_command(self._step, self._loaded, self._python), after)
        environ = agent_environ(self._step, self._loaded, told)
        child = start_step(
            argv,
            environ,
            cwd=self._code,
            local=self._step.local,
            told=listener is not None,
            guarded=self._guarded,
        )
        grace_s = self._loaded.config.launch.grace_s
        return RunningStep(child, batch_job=batch_job, grace_s=grace_s, on_end=on_end, listener=listener)

    def keep(self, running: RunningStep) -> None:
        """After a start: the step stays when its agents stand by."""
        if running.stands_by is not None:
            self._standing = running
        else:
            running.close()

    def dismiss(self) -> None:
        """There is no other start: agents that stand by go, and with them the step."""
        if self._standing is not None:
            _end(self._standing)
            self._standing = None


def _end(standing: RunningStep) -> None:
    standing.dismiss()
    standing.close()
