"""`sbin/bench leftovers`: what is there 5 s after a job has left the queue, after each of 17 kinds of end.

Each job has two nodes with two ranks each; each rank has two loader workers, a child in a session of its own, a
double-forked one, shared memory, temporary files and a port (tests/cluster/leaver/leave.py). What has not ended 30 s
after its end was brought about (150 s for the time limit) is cancelled. A run counts as one that leaves something when a
process, a shared-memory segment, a temporary file or a listening port of it is there, or when Slurm has drained a node
because it could not end the job there ("Kill task failed"); where SIGTERM is ignored the look is 7 s after, KillWait + 2 s.
Rivals start the same script, and are looked at in the same way.

Several jobs run at once, each on a pair of nodes of its own, with a /dev/shm and a /tmp of its own on each node, so that
none sees or clears away what another has left; half of them at most start at a time, which is what the machine's cores are
needed for. A run that could not be brought to its end, and one after which something was there for some seconds more
only, is repeated when nothing runs beside it, and that one counts. What cannot be measured even then is told, and is not
taken for clean.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame import RIVALS, ROOT, Bench, Measurement, NotMeasured, Row

RUNS = 20
PAIRS = max(2, min(6, 2 * (os.cpu_count() or 1)))
"""Jobs at once. A job at work needs hardly any time of the cores."""
STARTS = max(1, PAIRS // 2)
"""Of these so many start: half of the time that takes is Slurm's, in the other all cores are needed."""
LATE_S = 10.0
"""What is gone so much later was late, as on a machine that is overloaded; what is not was left."""
_FAILS = (AssertionError, NotMeasured, OSError, ValueError, subprocess.SubprocessError)
_shapes_before: list[Any] = []
_PORT = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29617; '


def _ours(rig: Any, job: Any, words: tuple[str, ...]) -> None:
    job.submit(*(f"slurm.time=00:0{word.partition('=')[2]}:00" for word in words if word.startswith("--time=")))


def _by_hand(rig: Any, job: Any, words: tuple[str, ...]) -> None:
    step = shlex.join(["srun", "--ntasks-per-node=2", "--kill-on-bad-exit=1", rig.python, "-u", *job.command])
    job.sbatch("--ntasks-per-node=2", *words, step=_PORT + step)


def _torchrun(rig: Any, job: Any, words: tuple[str, ...]) -> None:
    torchrun = str(Path(rig.python).parent / "torchrun")
    step = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", torchrun, "--nnodes=2", "--nproc-per-node=2"]
    step += ["--rdzv-backend=c10d", f"--rdzv-id={job.token}"]
    line = shlex.join(step) + " --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT " + shlex.join(job.command)
    job.sbatch("--ntasks-per-node=1", *words, step=_PORT + line)


def _submitit(rig: Any, job: Any, words: tuple[str, ...]) -> None:
    minutes = next((word.partition("=")[2] for word in words if word.startswith("--time=")), "30")
    rivals = str(rig.clone / RIVALS.relative_to(ROOT))
    argv = [rig.python, f"{rivals}/leaving_submitit.py", minutes, ",".join(job.asked), *job.command]
    environ = {**job.environ, "PYTHONPATH": f"{rivals}{os.pathsep}{rig.clone}"}
    done = rig.run(argv, cwd=job.folder, env=environ, timeout=120)
    if done.returncode != 0:
        raise NotMeasured(f"submitit: {done.stderr.strip().splitlines()[-1:]}")
    job.job = rig.track(done.stdout.split()[-1])


LAUNCHERS: dict[str, tuple[Callable[[Any, Any, tuple[str, ...]], None], str, str, str]] = {
    "ours": (_ours, "-m hpc.node", "-m hpc.launch", "-m hpc.launch"),
    "a hand-written srun": (_by_hand, "leave.py", "srun", "slurm_script"),
    "torchrun": (_torchrun, "torchrun", "srun", "slurm_script"),
    "submitit": (_submitit, "submitit.core._submit", "srun", "slurm_script"),
}
"""How each one starts the script, and words in the commands of its agents, its controller and its batch script."""


def _text(who: str, track: str) -> str:
    return f"runs that leave something, proctrack/{track}: {who}"


@dataclass(frozen=True)
class _Found:
    """One run: what it left, and whether that stayed; or why it could not be measured."""

    left: str = ""
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    late: bool = False
    obstacle: str = ""


class _Runs:
    """Runs of one launcher, several at once."""

    def __init__(self, rig: Any, launch: Callable[..., None], pairs: Sequence[Sequence[str]]) -> None:
        self._rig, self._launch = rig, launch
        self._starting = threading.Semaphore(STARTS)
        self._pairs: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()
        for pair in pairs:
            self._pairs.put(pair)
        self.at_once = len(pairs)

    def all(self, ends: Sequence[Any], told: str) -> list[_Found]:
        """Each of these ends once, beside each other, and what has to be repeated alone."""
        done = Counter[str]()

        def one(end: Any) -> _Found:
            found = self.one(end)
            done["runs"] += 1
            print(f"{told}: {done['runs']}/{len(ends)} {end.name}: {_words(found)}", file=sys.stderr, flush=True)
            return found

        with ThreadPoolExecutor(self.at_once) as pool:
            runs = [pool.submit(one, end) for end in ends]
            try:
                found = [run.result() for run in runs]
            except BaseException:  # somebody has stopped it: what has not begun is not to
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for number, end in enumerate(ends):
            if found[number].late or found[number].obstacle:
                found[number] = self.one(end)
                print(f"{told}: alone: {end.name}: {_words(found[number])}", file=sys.stderr, flush=True)
        return found

    def one(self, end: Any) -> _Found:
        import leftover_rig

        pair = self._pairs.get()
        job = None
        try:
            with self._starting:
                job = leftover_rig.Leaver(self._rig, end.kind, pair, own_files=True)
                self._launch(self._rig, job, tuple(end.submit))
                job.ready()
            left = leftover_rig.outcome(job, end)
            drained = self._drained(pair)
            count = {**left.count(), "drained_nodes": len(drained)}
            kinds = tuple(name.replace("_", " ") for name, number in count.items() if number)
            words = ", ".join(f"{number} {name}".replace("_", " ") for name, number in count.items() if number)
            names = tuple(map(str, (*left.processes, *left.shared_memory, *left.files, *left.ports, *drained)))
            if words:
                print(f"{end.name}: {job.story()}", file=sys.stderr, flush=True)
            until = time.monotonic() + LATE_S
            while left and time.monotonic() < until:
                time.sleep(1.0)
                left = job.look()
            return _Found(left=words, kinds=kinds, names=names, late=bool(words and not left and not drained))
        except _FAILS as error:
            return _Found(
                obstacle=f"{end.name}: {(str(error).strip().splitlines() or ['no reason was told'])[0][:200]}"
            )
        finally:
            with contextlib.suppress(*_FAILS):  # the next run on these nodes tells
                if job is not None:
                    job.cancel()
                    job.close()
                broken = {pair[1]} if end.breaks_node else set()
                for node in sorted(broken.union(self._drained(pair))):
                    self._rig.devcluster("heal", node)
            self._pairs.put(pair)

    def _drained(self, pair: Sequence[str]) -> list[str]:
        """Nodes of these that take no more jobs until an administrator has seen to them."""
        return [node for node in pair if "DRAIN" in self._rig.node_state(node)]


def _words(found: _Found) -> str:
    if found.obstacle:
        return f"not measured: {found.obstacle}"
    more = "; ..." if len(found.names) > 4 else ""
    shown = f"{found.left}: {'; '.join(found.names[:4])}{more}"
    return f"{'for some seconds more ' if found.late else ''}{shown}" if found.left else "nothing left"


def _measured(who: str, track: str) -> Callable[[Bench], Iterator[Row]]:
    def run(bench: Bench) -> Iterator[Row]:
        rig = _cluster(bench, track)
        import leftover_rig

        launch, *words_of_commands = LAUNCHERS[who]
        counts = (2, 1) if bench.quick else (RUNS, 3)
        runs = bench.turns or counts[who != "ours"]
        kinds = leftover_rig.ends(*words_of_commands)
        ends = [end for _ in range(runs) for end in kinds]
        names = rig.node_names
        pairs = [names[first : first + 2] for first in range(0, len(names) - 1, 2)]
        found = _Runs(rig, launch, pairs).all(ends, f"{who}, {track}")
        left = Counter[str](end.name for end, one in zip(ends, found, strict=True) if one.left)
        words = {end.name: one.left for end, one in zip(ends, found, strict=True) if one.left}
        told = "; ".join(f"{name} {number}/{runs} ({words[name]})" for name, number in left.items()) or "none"
        by_kind = Counter[str](kind for one in found for kind in one.kinds)
        obstacles = [one.obstacle for one in found if one.obstacle]
        if obstacles:
            bench.failed = True
            print(f"not measured: {len(obstacles)} of {len(ends)} runs: {obstacles[0]}", file=sys.stderr, flush=True)
        measured = len(ends) - len(obstacles)
        if not measured:
            raise NotMeasured(obstacles[0])
        what = _text(who, track)
        yield Row(
            what=f"{what} ({measured} runs, {len(kinds)} kinds of end)",
            against=f"counted: {', '.join(f'{name} {number}' for name, number in by_kind.items())}".removesuffix(": "),
            ratio=float(sum(left.values())),
            goal=0 if who == "ours" else None,
            reason=told,
        )

    return run


def _cluster(bench: Bench, track: str) -> Any:
    """The bench's cluster, made anew with this way of tracking processes and pairs of nodes; afterwards as it was."""
    rig = bench.rig()
    before = rig.shape
    if (before.proctrack, before.nodes) != (track, 2 * PAIRS):
        if not _shapes_before:
            _shapes_before.append(before)
            bench.at_end(lambda: _up(rig, before.nodes, before.gpus_per_node, before.proctrack))
        _up(rig, 2 * PAIRS, 2, track)
        os.environ["SLURM_CONF"] = str(rig.slurm_conf)
    return rig


def _up(rig: Any, nodes: int, gpus: int, track: str) -> None:
    rig.devcluster("down")
    words = ["--nodes", str(nodes), "--gpus-per-node", str(gpus), "--proctrack", track]
    rig.devcluster("up", *words, timeout=300)


MEASUREMENTS = [
    Measurement([_text(who, track)], _measured(who, track), needs_slurm=True)
    for track in ("linuxproc", "cgroup")
    for who in LAUNCHERS
]
