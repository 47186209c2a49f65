"""The controller: one per allocation. It starts the agents with one srun, waits, decides, and says how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import hpc
from hpc import exitcodes
from hpc.allocation.allocation import Allocation
from hpc.allocation.history import newest_checkpoint, stalled_attempts
from hpc.allocation.policy import Action, Decision, Ending, Limits, decide, made_steps
from hpc.allocation.requeue import KILLED_WITHIN_S, JobFacts, Requeued, continuation, job_facts, requeue
from hpc.allocation.verdict import End, complain, read_end, tell
from hpc.command import target_of
from hpc.config import Loaded
from hpc.errors import HpcError, NeverStarted, SlurmCommandError, printable
from hpc.rundir import ATTEMPT_VARIABLE, END_TIME_VARIABLE, RESTART_VARIABLE, RUN_DIR_VARIABLE, RunDirectory
from hpc.slurm import commands

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CONFIG_LIMIT = 96 * 1024  # one string of an environment may have 128 KiB: execve(2), MAX_ARG_STRLEN
LAST_ACTS_S = 8.0
"""Kept free before the time limit: for the step's end, the decision, and the requeue."""
LONGEST_WAIT_S = 86_400.0  # a day; then the end time is asked for again
_PR_SET_PDEATHSIG = 1  # prctl(2)


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

    @property
    def workers(self) -> int:
        """Workers over all nodes, as far as it is known before the agents have counted."""
        return self.nodes * (self.workers_per_node or 1)


def plan_step(allocation: Allocation, loaded: Loaded) -> Step:
    """The job step for this allocation and configuration; pure."""
    launch = loaded.config.launch
    local = not allocation.job_id
    workers = launch.workers_per_node or (1 if local else allocation.gpus_per_node) or 1
    tasks = workers if launch.layout == "task-per-gpu" and not local else 1
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
    command.append(f"--warning={loaded.config.slurm.signal}")
    command += [f"--preload={name}" for name in launch.preload]
    if not launch.fork:
        command.append("--no-fork")
    if launch.allow_loopback:
        command.append("--allow-loopback")
    if loaded.config.command:
        return [*command, "--", *loaded.config.command]
    return [*command, loaded.config.job]


def step_command(step: Step, agent: Sequence[str]) -> list[str]:
    """The agents as one job step. GPUs are not named: the step gets all of the job's, in the form the job asked for.

    Source: srun(1): --kill-on-bad-exit, --cpus-per-task (not inherited from sbatch since 22.05), --export.
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
        "--export=ALL",
    ]
    if step.cpus_per_task is not None:
        command.append(f"--cpus-per-task={step.cpus_per_task}")
    if step.overcommit:
        command.append("--overcommit")
    return [*command, *agent]


class Controller:
    """One attempt of one run: as many starts of the step as the policy grants, then its last decision."""

    def __init__(
        self, allocation: Allocation, loaded: Loaded, run_dir: RunDirectory, *, code: str | None = None
    ) -> None:
        """`code`: the directory that agents import from when it is not the working directory."""
        self.allocation, self.loaded, self.run_dir, self.code = allocation, loaded, run_dir, code
        self.folder = run_dir.attempt(allocation.attempt)
        self.step = plan_step(allocation, loaded)
        self.python = loaded.config.launch.python or sys.executable
        self.limits = Limits(
            max_restarts=loaded.config.launch.max_restarts, retry_failures=loaded.config.launch.retry_failures
        )
        self.notices = (signal.SIGTERM, signal.Signals[f"SIG{loaded.config.slurm.signal}"])
        self.end_time = allocation.end_time
        self.restarts = self.retried = 0
        self.steps_from = 0
        self.began = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._undelivered: list[int] = []
        self._events_before = 0
        self._heard: signal.Signals | None = None
        self._notice: str | None = None
        self._own_notice: str | None = None  # the training core's: its own clock
        self._keyboard = False
        self._signals = 0

    def run(self) -> int:
        """Start the step, wait for it, decide, as often as it takes; returns the exit code of the job."""
        if self.loaded.config.command:
            target_of(self.loaded.config.command)  # refused once, and not once per node
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for number in {*FORWARDED, *self.notices}:
            signal.signal(number, self._forward)
        if self.end_time is None:
            self._ask_for_end_time()
        self.steps_from, _ = newest_checkpoint(self.run_dir)
        self.say(self.headline())
        while True:
            self._clear_for_start()
            end = self._note_end(self.start_and_wait())
            decision = self._decide(end)
            if decision.action is Action.AGAIN:
                self._tell(end)
                complain(f"{decision.reason}, in {decision.pause_s:g} s")
                if self._pause(decision.pause_s):
                    self.retried += decision.is_retry
                    self.restarts += not decision.is_retry
                    continue
                decision = self._decide(end)  # a signal came meanwhile
            return self._act(decision, end)

    def say(self, text: str) -> None:
        print(f"hpc.launch: {printable(text)}", flush=True)

    def headline(self) -> str:
        """Who runs what, where and with which interpreter and torch; torch itself is not imported for it."""
        step, allocation = self.step, self.allocation
        try:
            torch = importlib.metadata.version("torch") if self.python == sys.executable else "of its own"
        except importlib.metadata.PackageNotFoundError:
            torch = "not installed"
        where = f"job {allocation.run_id}, attempt {allocation.attempt}" if allocation.job_id else "local run"
        gpus = f" x {allocation.gpus_per_node} GPUs" if allocation.gpus_per_node else ""
        nodes = f"{step.nodes} node{'s' if step.nodes > 1 else ''}{gpus}"
        what = " ".join(self.loaded.config.command) or self.loaded.config.job
        layout = f", {self.loaded.config.launch.layout}" if not step.local else ""
        return f"{where}: {what} on {nodes}{layout}; {self.python}, torch {torch}; {self.run_dir.path}"

    def environ(self) -> dict[str, str]:
        """The agents' environment: this one, and what the controller has to tell them."""
        environ = dict(os.environ)
        environ[RUN_DIR_VARIABLE] = str(self.run_dir.path)
        environ[ATTEMPT_VARIABLE] = str(self.allocation.attempt)
        environ[RESTART_VARIABLE] = str(self.restart)
        if self.end_time is not None:
            environ[END_TIME_VARIABLE] = f"{self.end_time:.0f}"
        environ["HPC_SECRET"] = secrets.token_hex(16)
        environ["PYTHONUTF8"] = "1"
        root = str(Path(hpc.__file__).resolve().parent.parent)
        if Path(root).name not in ("site-packages", "dist-packages"):
            before = environ.get("PYTHONPATH")
            environ["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else root
        if self.step.local and sys.stdout.isatty():
            environ["HPC_TERMINAL"] = "1"
        if not self.loaded.config.command:
            text = self.loaded.to_yaml()
            if len(text.encode()) > CONFIG_LIMIT:
                raise HpcError(
                    f"the merged configuration has {len(text)} characters; at most {CONFIG_LIMIT} can be handed on"
                )
            environ["HPC_CONFIG"] = text
        return environ

    def start_and_wait(self) -> int:
        """Start the step and pass signals on until it ends; returns its exit code as a shell would give it.

        Raises:
            NeverStarted: srun is missing or may not be executed.
        """
        argv = step_command(self.step, agent_command(self.step, self.loaded, self.python))
        parent = os.getpid()
        local = self.step.local
        libc = ctypes.CDLL(None)

        def in_child() -> None:
            # srun passes SIGTERM on to its tasks; the agent knows SIGHUP from a lost launcher
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP if local else signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(exitcodes.UNAVAILABLE)
            if local:
                os.setpgid(0, 0)  # Ctrl-C reaches the agent once, through the controller

        try:
            self._child = subprocess.Popen(
                argv, env=self.environ(), cwd=self.code, stdin=subprocess.DEVNULL, preexec_fn=in_child
            )
        except OSError as error:
            raise NeverStarted(
                f"cannot run {argv[0]}: {error.strerror}; is Slurm's client on PATH in the batch step? ({os.environ.get('PATH')})"
            ) from None
        for number in self._undelivered:
            self._child.send_signal(number)  # it came while the child was being made
        self._undelivered.clear()
        return exitcodes.from_returncode(self._wait(self._child))

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the step. Shortly before the time limit it gets SIGTERM, so that the requeue comes before Slurm's end.

        Not where the time was short from the start: then it would never run.
        """
        needed = self.loaded.config.launch.grace_s + LAST_ACTS_S
        left = self._time_left()
        if left is None or left <= needed:
            return child.wait()
        with _Ending(child) as ending:
            while left is not None and left > needed:
                if ending.within(min(left - needed, LONGEST_WAIT_S)):
                    return child.wait()
                self._ask_for_end_time()  # somebody may have given the job more time
                left = self._time_left()
        self.say(f"{left or 0.0:.0f} s are left of the time limit: SIGTERM to the step")
        self._notice = self._notice or "the time limit"
        child.send_signal(signal.SIGTERM)
        return child.wait()

    def _time_left(self) -> float | None:
        return None if self.end_time is None else self.end_time - time.time()

    def _ask_for_end_time(self) -> None:
        if not self.step.local:
            with contextlib.suppress(SlurmCommandError):
                self.end_time = job_facts(self.allocation).end_time or self.end_time

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._heard = signal.Signals(number)
        if number in self.notices:
            self._notice = self._notice or self._heard.name
        elif number in (signal.SIGINT, signal.SIGHUP):
            self._keyboard = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)
        else:
            self._undelivered.append(number)

    # ---- between two starts, and at the end ------------------------------------------------------------------------

    @property
    def restart(self) -> int:
        """Starts of the step in this allocation before the present one."""
        return self.restarts + self.retried

    def _clear_for_start(self) -> None:
        """Take away what an earlier start has left; say so when training begins anew although it is no first attempt."""
        for path in (self.folder / "outcome.json", *self.folder.glob("error-*.json")):
            path.unlink(missing_ok=True)
        self._events_before = sum(1 for _ in self.run_dir.events())
        if (self.allocation.attempt or self.restart) and not self.loaded.config.command:
            if newest_checkpoint(self.run_dir)[1] is None:
                start = f"attempt {self.allocation.attempt}" + (f", restart {self.restart}" if self.restart else "")
                complain(f"warning: {start}, no checkpoint in {self.run_dir.checkpoints}, starting at step 0")

    def _note_end(self, code: int) -> End:
        """Read how the step ended, and write it into the record."""
        news = list(islice(self.run_dir.events(), self._events_before, None))
        end = read_end(self.folder, code, started=any(event.get("event") == "started" for event in news))
        if any(event.get("event") == "stopping" and event.get("reason") == "TIME" for event in news):
            self._own_notice = "the time limit"
        first = end.first
        self.run_dir.append_event(
            "ended",
            attempt=self.allocation.attempt,
            restart=self.restart,
            code=end.code,
            started=end.started,
            signal=self._heard.name if self._heard else None,
            first={key: first.get(key) for key in ("rank", "host", "code", "message")} if first else None,
            **self._steps(),
        )
        return end

    def _steps(self) -> dict[str, Any]:
        """Where this attempt began and how far its newest checkpoint is; unknown for a command."""
        if self.loaded.config.command:
            return {"steps_from": None, "steps_to": None, "checkpoint": None}
        step, folder = newest_checkpoint(self.run_dir)
        return {"steps_from": self.steps_from, "steps_to": step, "checkpoint": folder.name if folder else None}

    def _decide(self, end: End) -> Decision:
        """Ask Slurm and the record, decide, and write the decision into the record (a good end needs none)."""
        if end.code == exitcodes.DONE:
            return Decision(action=Action.DONE, reason="finished")
        allocation, first, steps = self.allocation, end.first or {}, self._steps()
        facts = self._facts()
        ending = Ending(
            code=end.code,
            started=end.started,
            reported=end.reported,
            by_us=bool(first.get("by_us")),
            peer_gone=bool(first.get("peer_gone")),
            notice=self._notice or self._own_notice,
            notice_signals=tuple(int(number) for number in self.notices),
            keyboard=self._keyboard,
            state=facts.state,
            preempted=facts.preempted,
            timed_out=facts.timed_out,
            may_requeue=facts.may_requeue,
            lost_nodes=self._lost_nodes(end),
            local=self.step.local,
            steps_from=steps["steps_from"],
            steps_to=steps["steps_to"],
            seconds=time.monotonic() - self.began,
            stalled=stalled_attempts(self.run_dir.events(), allocation.job_id, allocation.attempt),
            attempt=allocation.attempt,
            restarts=self.restarts,
            retried=self.retried,
            time_left_s=self._time_left(),
        )
        decision = decide(ending, self.limits)
        self.run_dir.append_event(
            "decided",
            attempt=allocation.attempt,
            restart=self.restart,
            job_id=allocation.job_id,
            decision=decision.action.value,
            reason=decision.reason,
            made_steps=made_steps(ending),
            **steps,
        )
        return decision

    def _facts(self) -> JobFacts:
        if self.step.local:
            return JobFacts()
        try:
            return job_facts(self.allocation)
        except SlurmCommandError as error:
            complain(f"Slurm cannot be asked for this job's state: {error}")
            return JobFacts()

    def _lost_nodes(self, end: End) -> tuple[str, ...]:
        """Nodes of the allocation that Slurm has given up, when an agent or its node has gone."""
        gone = end.started and (not end.reported or end.code == exitcodes.UNAVAILABLE)
        if self.step.local or not gone or self.allocation.nodes < 2 or not self.allocation.node_list:
            return ()
        try:
            return tuple(commands.lost_nodes(self.allocation.node_list))
        except SlurmCommandError:
            return ()

    def _pause(self, seconds: float) -> bool:
        """Wait; False as soon as a notice came or somebody stopped it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._notice is not None or self._keyboard:
                return False
            time.sleep(0.1)
        self._undelivered.clear()
        return self._notice is None and not self._keyboard

    def _tell(self, end: End) -> None:
        heard = self._heard.name if self._heard else None
        tell(end, attempt=self.allocation.attempt, restart=self.restart, folder=self.folder, heard=heard)

    def _act(self, decision: Decision, end: End) -> int:
        """Do what was decided last; returns the exit code of the job."""
        if decision.action is Action.DONE:
            return exitcodes.DONE
        saved = end.code == exitcodes.WANTS_ANOTHER_ATTEMPT
        if decision.action is Action.REQUEUE:
            if not saved:
                self._tell(end)
            return self._come_back(decision)
        plain = end.started and not self.restart and not (self._notice or self._keyboard)
        if saved or not plain or end.code == exitcodes.UNAVAILABLE:
            complain(f"attempt {self.allocation.attempt} asks for no other one: {decision.reason}")
        if not saved:
            self._tell(end)
        stalled = saved and decision.stalled
        return exitcodes.FAILED if stalled else end.exit_code

    def _come_back(self, decision: Decision) -> int:
        """Back into the queue, or the command with which the user goes on. The last act."""
        again = exitcodes.WANTS_ANOTHER_ATTEMPT
        attempt, run_id = self.allocation.attempt, self.allocation.run_id
        steps = self._steps()
        where = f", checkpoint {steps['checkpoint']}" if steps["checkpoint"] else ""
        headline = f"attempt {attempt} {decision.reason}{where}"
        if self.step.local:
            self.say(f"{headline}; go on with: {continuation(self.allocation, self.loaded, self.run_dir)}")
            return again
        signals = self._signals
        outcome = requeue(self.allocation, say=complain)
        if outcome is Requeued.QUEUED:
            self.run_dir.append_event("requeued", attempt=attempt, job_id=run_id)
            self.say(f"{headline}; job {run_id} is back in the queue")
            deadline = time.monotonic() + KILLED_WITHIN_S
            while self._signals == signals and time.monotonic() < deadline:
                time.sleep(0.1)  # Slurm ends this batch step
        elif outcome is Requeued.ENDING:
            complain(f"{headline}; left as it is, since Slurm is ending job {run_id} itself")
        elif outcome is Requeued.NOT_ALLOWED:
            is_batch = self._facts().is_batch
            command = continuation(self.allocation, self.loaded, self.run_dir, is_batch=is_batch)
            complain(f"{headline}; job {run_id} may not be requeued, go on with: {command}")
        else:
            complain(f"{headline}; it could not be requeued, type: scontrol requeue {run_id}")
        return again


class _Ending:
    """A child's end, to be waited for with a time limit and without looking again and again. Source: pidfd_open(2)."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._selector = selectors.DefaultSelector()
        self._descriptor: int | None = None

    def __enter__(self) -> _Ending:
        try:
            self._descriptor = os.pidfd_open(self._child.pid)
            self._selector.register(self._descriptor, selectors.EVENT_READ)
        except OSError:
            return self  # a kernel before 5.3
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def within(self, seconds: float) -> bool:
        """Whether it ended in that time; signals are handled meanwhile."""
        if self._descriptor is not None:
            return bool(self._selector.select(seconds))
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
