"""A check of the allocation before work is given to it: one task per node without torch, then ranks of the worker's kind.

Bounded in seconds as a whole; what a node does not tell in time is told of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc import exitcodes
from hpc.allocation.allocation import Allocation
from hpc.allocation.fitness import Checked, named
from hpc.allocation.step import agent_command, agent_environ, plan_step, start_step, step_command
from hpc.allocation.verdict import read_end
from hpc.config import Loaded
from hpc.lines import Collector
from hpc.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from hpc.slurm.nodelist import expand_nodelist

RANKS = ("-m", "hpc.train.checkup")
PHASE_S = 20.0
"""For what a node has to tell after its first line: calls, a file of 8 MiB, a look at the others' files."""
LEAVE_S = 3.0
AGAIN_S = 10.0
"""With less time the nodes are not asked a second time."""


def check(
    allocation: Allocation,
    loaded: Loaded,
    folder: Path,
    *,
    limit_s: float,
    with_ranks: bool = True,
    say: Callable[[str], None],
) -> Checked:
    """Check all nodes of the allocation (outside of one, this machine) within `limit_s` seconds.

    `folder` must not exist, and lie where all nodes can write; it is made, and removed at the end.

    Raises:
        NeverStarted: srun, or the interpreter, cannot be run.
        OSError: the folder cannot be made.
    """
    deadline = time.monotonic() + limit_s
    nodes = tuple(expand_nodelist(allocation.node_list)) if allocation.job_id else (os.uname().nodename,)
    checked = Checked(nodes=nodes, gpus_asked=allocation.gpus_per_node)
    folder.mkdir(mode=0o700)
    try:
        say(f"checking {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {limit_s:.0f} s at most")
        if not _look_at_nodes(allocation, loaded, folder, checked, deadline):
            # srun ends the whole step when it cannot reach one node: the others are asked again, without that one
            if checked.told and deadline - time.monotonic() > AGAIN_S:
                say(f"nothing is heard of {', '.join(checked.silent)}: going on without")
                _look_at_nodes(allocation, loaded, folder, checked, deadline)
        if not checked.told:  # then it is not the nodes
            checked.silent.clear()
            checked.notes.append("the step of this check never started on any node: srun says why, above")
            return checked
        good = [node for node in nodes if node not in checked.silent]
        if with_ranks and good and deadline - time.monotonic() > LEAVE_S:
            say(f"measuring with ranks on {len(good)} of {len(nodes)} nodes")
            _look_at_ranks(allocation, loaded, folder, checked, good, deadline)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return checked


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _look_at_nodes(allocation: Allocation, loaded: Loaded, folder: Path, checked: Checked, deadline: float) -> bool:
    """All nodes that are not known to be silent; False when some did not even begin, and nothing more was asked."""
    nodes = [node for node in checked.nodes if node not in checked.silent]
    limit_s = max(1.0, deadline - time.monotonic())
    python = loaded.config.launch.python or sys.executable
    task = [python, "-u", "-m", "hpc.node.checkup", f"--folder={folder}", f"--limit={limit_s:.0f}"]
    allocation = dataclasses.replace(allocation, nodes=len(nodes))
    step = dataclasses.replace(plan_step(allocation, loaded), tasks_per_node=1, cpus_per_task=None, overcommit=True)
    argv = step_command(step, task)
    if not step.local:
        argv[1:1] = ["--kill-on-bad-exit=0", f"--nodelist={','.join(nodes)}"]
        argv.remove("--kill-on-bad-exit=1")
    environ = agent_environ(step, loaded, {})
    child = start_step(argv, environ, cwd=None, local=step.local, piped=True)
    talk = _Talk(child, checked)
    try:
        # a first line may wait for a cold interpreter; half of the time is kept for the rest, a second pass among it
        share = 0.8 if checked.silent else 0.5
        if not talk.wait_for("hello", nodes, time.monotonic() + limit_s * share, "it did not start its task"):
            child.send_signal(signal.SIGTERM)
            return False
        here = nodes
        talk.say(peers={node: checked.told[node].get("port", 0) for node in here})
        phase_end = min(deadline, time.monotonic() + PHASE_S)
        talk.wait_for("reach", here, phase_end, "it stopped while it called the others")
        talk.wait_for("wrote", here, phase_end, f"it stopped while it wrote into {folder.parent}")
        wrote = [node for node in here if "mib_per_s" in checked.told[node]]
        talk.say(read=wrote)
        phase_end = min(deadline, time.monotonic() + PHASE_S)
        talk.wait_for("read", here, phase_end, f"it stopped while it looked into {folder.parent}")
        return True
    finally:
        talk.close()


class _Talk:
    """Both directions of a running step: lines of its tasks, and lines to all of them."""

    def __init__(self, child: subprocess.Popen[bytes], checked: Checked) -> None:
        self._child, self._checked = child, checked
        self._heard: set[tuple[str, str]] = set()
        assert child.stdout is not None
        self._lines, self._collector = _lines(child.stdout.fileno()), Collector()

    def wait_for(self, kind: str, nodes: Sequence[str], deadline: float, otherwise: str) -> bool:
        """Hear until all these nodes have told this; the others are silent, for the reason given, and it is False."""
        while any((node, kind) not in self._heard for node in nodes if node not in self._checked.silent):
            line = self._lines(deadline)
            if line is None:
                break
            self._hear(line)
        for node in nodes:
            if (node, kind) not in self._heard and node not in self._checked.silent:
                self._checked.silent[node] = otherwise
        return not any(node in self._checked.silent for node in nodes)

    def _hear(self, line: bytes) -> None:
        told = self._collector.add(line)
        if told is None:
            return
        node = named(str(told.pop("node", "")), self._checked.nodes)
        kind = str(told.pop("kind", ""))
        self._heard.add((node, kind))
        if "error" in told:
            told["write_error"] = told.pop("error")
        self._checked.told.setdefault(node, {}).update(told)

    def say(self, **message: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            return  # the step has gone: what its tasks did not tell shows it

    def close(self) -> None:
        """Let the tasks go; what does not leave is ended."""
        if self._child.stdin is not None:
            try:
                self._child.stdin.close()
            except OSError:
                pass
        end(self._child)


def end(child: subprocess.Popen[bytes]) -> None:
    """Wait for a moment, then end it: srun with SIGTERM, which ends its step, and at last with SIGKILL."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            child.send_signal(number)
        try:
            child.wait(LEAVE_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if child.stdout is not None:
        child.stdout.close()


def _lines(descriptor: int) -> Callable[[float], bytes | None]:
    """A reader of whole lines: the next one, or None at the end or when the deadline (in monotonic seconds) is over."""
    selector = selectors.DefaultSelector()
    selector.register(descriptor, selectors.EVENT_READ)
    waiting: list[bytes] = []
    rest = b""

    def read(deadline: float) -> bytes | None:
        nonlocal rest
        while not waiting:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                return None
            *whole, rest = (rest + data).split(b"\n")
            waiting.extend(whole)
        return waiting.pop(0)

    return read


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _look_at_ranks(
    allocation: Allocation, loaded: Loaded, folder: Path, checked: Checked, good: Sequence[str], deadline: float
) -> None:
    limit_s = deadline - time.monotonic()
    config = dataclasses.replace(
        loaded.config,
        command=list(RANKS),
        launch=dataclasses.replace(
            loaded.config.launch,
            rendezvous_timeout_s=max(1.0, limit_s - LEAVE_S),
            grace_s=1.0,
            hang_timeout_s=0.0,
            preload=[],
        ),
    )
    asking = Loaded(config, None)
    step = plan_step(dataclasses.replace(allocation, nodes=len(good)), asking)
    argv = step_command(step, agent_command(step, asking, config.launch.python or sys.executable))
    if len(good) < len(checked.nodes):
        argv.insert(1, f"--nodelist={','.join(good)}")
    attempt = folder / "attempt-0"
    attempt.mkdir(mode=0o700)
    told = {RUN_DIR_VARIABLE: str(folder), ATTEMPT_VARIABLE: "0", "HPC_CHECKUP_PATIENCE_S": f"{limit_s:.0f}"}
    child = start_step(argv, agent_environ(step, asking, told), cwd=None, local=step.local, piped=True)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    reader, collector = _lines(child.stdout.fileno()), Collector()
    while (line := reader(deadline)) is not None:
        heard = collector.add(line)
        if heard is not None and heard.get("kind") == "ranks":
            checked.ranks = [rank for rank in heard.get("ranks", []) if isinstance(rank, dict)]
    late = time.monotonic() >= deadline
    end(child)
    code = exitcodes.from_returncode(child.returncode)
    if code == exitcodes.DONE and checked.ranks:
        return
    failure = read_end(attempt, code, started=any(attempt.glob("rank-*.log"))).first
    if failure is not None and failure.get("host"):
        node = named(str(failure["host"]), checked.nodes)
        checked.failed[node] = f"rank {failure.get('rank')} failed there: {failure.get('message')}"
    elif not checked.ranks:
        checked.notes.append(
            "the ranks did not come to an end in time"
            if late
            else f"the ranks ended with {code}: {exitcodes.describe(code)}"
        )


def overall(checked: Checked) -> Iterator[str]:
    """What was measured over all ranks, in words."""
    speeds = [float(rank["all_gb_s"]) for rank in checked.ranks if rank.get("all_gb_s") is not None]
    if speeds:
        device = checked.ranks[0].get("device")
        backend = "nccl" if device == "cuda" else "gloo"
        yield f"all-reduce over all {len(checked.ranks)} ranks ({backend}): {min(speeds):.3g} GB/s"
    unknown = {str(told["gpus_unknown"]) for told in checked.told.values() if told.get("gpus_unknown")}
    for why in sorted(unknown):
        yield f"GPUs were not asked about memory errors: {why}"
    yield from checked.notes
