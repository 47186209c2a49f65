"""The controller: one per allocation. It starts the agents with one srun, waits, and says how it ended."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hpc
from hpc import exitcodes
from hpc.allocation.allocation import Allocation
from hpc.command import target_of
from hpc.config import Loaded
from hpc.errors import HpcError, NeverStarted, printable
from hpc.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDirectory

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
CONFIG_LIMIT = 96 * 1024  # one string of an environment may have 128 KiB: execve(2), MAX_ARG_STRLEN
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
    """One attempt of one run."""

    def __init__(
        self, allocation: Allocation, loaded: Loaded, run_dir: RunDirectory, *, code: str | None = None
    ) -> None:
        """`code`: the directory that agents import from when it is not the working directory."""
        self.allocation, self.loaded, self.run_dir, self.code = allocation, loaded, run_dir, code
        self.folder = run_dir.attempt(allocation.attempt)
        self.step = plan_step(allocation, loaded)
        self.python = loaded.config.launch.python or sys.executable
        self._child: subprocess.Popen[bytes] | None = None
        self._heard: signal.Signals | None = None

    def run(self) -> int:
        """Start the step, wait for it, say how it ended; returns the exit code of the job."""
        if self.loaded.config.command:
            target_of(self.loaded.config.command)  # refused once, and not once per node
        self.folder.mkdir(mode=0o700, exist_ok=True)
        (self.folder / "outcome.json").unlink(missing_ok=True)
        self.say(self.headline())
        code = self.start_and_wait()
        return self.conclude(code)

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
        for number in FORWARDED:
            signal.signal(number, self._forward)
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
        if self._heard is not None:
            self._child.send_signal(self._heard)  # it came while the child was being made
        return exitcodes.from_returncode(self._child.wait())

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._heard = signal.Signals(number)
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def conclude(self, code: int) -> int:
        """Print the verdict (the first failing rank's traceback last), write the record, return the exit code."""
        outcome = self._outcome()
        started = any(
            event.get("event") == "started" and event.get("attempt") == self.allocation.attempt
            for event in self.run_dir.events()
        )
        if outcome is not None and outcome.get("code"):
            code = int(outcome["code"])
        never = code != exitcodes.DONE and not started
        first = outcome.get("first") if outcome else None
        self.run_dir.append_event(
            "ended",
            attempt=self.allocation.attempt,
            code=code,
            started=started,
            signal=self._heard.name if self._heard else None,
            first={key: first[key] for key in ("rank", "host", "code", "message")} if first else None,
        )
        if code == exitcodes.DONE:
            return code
        if never:
            known = code in (exitcodes.UNAVAILABLE, exitcodes.BAD_ENVIRONMENT)
            why = "the lines above say why" if known else f"the step ended with {code} before any rank ran"
            self._complain(f"no rank was started: {why}")
            return code if known else exitcodes.UNAVAILABLE
        self._verdict(code, first, int(outcome.get("others", 0)) if outcome else 0)
        return code

    def _outcome(self) -> dict[str, Any] | None:
        try:
            outcome = json.loads((self.folder / "outcome.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return outcome if isinstance(outcome, dict) else None

    def _verdict(self, code: int, first: Mapping[str, Any] | None, others: int) -> None:
        attempt = self.allocation.attempt
        if first is None:
            self._complain(f"attempt {attempt} ended with {code}: {exitcodes.describe(code)}; logs in {self.folder}")
            return
        by_signal = f" after {self._heard.name} came to the job" if first.get("by_us") and self._heard else ""
        if others:
            self._complain(f"{others} other rank{'s' if others > 1 else ''} failed after it; logs in {self.folder}")
        trace = str(first.get("traceback") or "").rstrip("\n")
        if trace:
            print(trace, file=sys.stderr, flush=True)
        message = str(first.get("message", ""))
        ended = exitcodes.describe(int(first.get("code", code)))
        reason = f"{ended}: {message}" if message != ended else ended
        log = f"; log {first['log']}" if first.get("log") else ""
        self._complain(f"rank {first['rank']} on {first['host']}, attempt {attempt}: {reason}{by_signal}{log}")

    def _complain(self, text: str) -> None:
        sys.stdout.flush()
        print(f"hpc.launch: {printable(text)}", file=sys.stderr, flush=True)
