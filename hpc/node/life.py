"""The life of one Slurm task: a start of its workers, and another one each time the controller says so."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator

from hpc import exitcodes
from hpc.errors import HpcError
from hpc.node import lastword, leftovers, signals
from hpc.node.agent import Agent
from hpc.node.environment import TaskEnvironment
from hpc.node.settings import AgentSettings
from hpc.node.signals import FORWARDED
from hpc.node.standby import Standby


def run(task: TaskEnvironment, settings: AgentSettings) -> int:
    """Do all of it; returns the exit code of the first worker that failed, anywhere in the last start of the step.

    In a forked worker it returns that worker's own exit code instead (or raises its SystemExit).

    Raises:
        RendezvousError, EnvironmentMismatch, NeverStarted: nothing was started.
    """
    standby = Standby.wanted()
    environ, gone_on = dict(os.environ), False
    while True:
        agent = Agent(task, settings, standby)
        with _told(agent):
            start = agent.assemble()
        if start is not None:
            if standby is not None:
                standby.close()
            del agent
            return start.become()
        try:
            with _told(agent):
                code = agent.watch()
        finally:
            leftovers.end_descendants()  # whatever has come in between: the screen can be gone before this process
            agent.tidy.end()
        if lastword.speak(task, standby, settings.code):
            return code
        ends_well = code in (exitcodes.DONE, exitcodes.WANTS_ANOTHER_ATTEMPT)
        # once a step has gone on, its exit code may tell of an earlier start: the controller hears of this one in any case
        if standby is None or not (agent.is_complete if gone_on else agent.can_go_on and not ends_well):
            return code
        _leave_signals(agent, standby, code)
        if task.task_rank == 0 and not standby.report({**agent.outcome, "code": code}):
            return code
        word = standby.word()
        if word is None:
            lastword.speak(task, standby, settings.code)
            return code
        os.environ.clear()
        os.environ.update({**environ, **word})
        gone_on = True


@contextlib.contextmanager
def _told(agent: Agent) -> Iterator[None]:
    """What the agent cannot go on from is noted for the controller; a fault of its own is, too."""
    try:
        yield
    except HpcError as error:
        agent.refuse(error)
        raise
    except Exception as error:
        words = "".join(traceback.format_exception_only(error)).strip()
        agent.refuse(HpcError(f"the agent on {agent.host_name} itself failed, its traceback is in the log: {words}"))
        raise


def _leave_signals(agent: Agent, standby: Standby, code: int) -> None:
    """From here on a signal that ends ends this process, which has no workers; a warning is kept for the next ones."""
    held = {*FORWARDED, *agent.warnings, signal.SIGCHLD}
    signals.hold(held)
    agent.let_go()
    startup = signals.listen(anew=True)
    startup.also(agent.settings.warning)

    def end(_: signal.Signals) -> None:
        try:
            lastword.speak(agent.task, standby, agent.settings.code)
        finally:
            os._exit(code)

    startup.on_end(end)
    signals.release()
