"""`sbin/bench leftovers`: what is there 5 s after a job has left the queue, after each of 15 kinds of end.

Each job has two nodes with two ranks each; each rank has two loader workers, a child in a session of its own, a
double-forked one, shared memory, temporary files and a port (tests/cluster/leaver/leave.py). What has not ended 30 s
after its end was brought about (150 s for the time limit) is cancelled. A run counts as one that leaves something when a process, a shared-memory segment, a file or a listening port of it is there; where SIGTERM is
ignored the look is 7 s after, KillWait + 2 s. Rivals start the same script, and are looked at in the same way.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from frame import RIVALS, ROOT, Bench, Measurement, NotMeasured, Row

RUNS = 20
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
    argv = [rig.python, f"{rivals}/leaving_submitit.py", minutes, *job.command]
    environ = {**job.environ, "PYTHONPATH": f"{rivals}{os.pathsep}{rig.clone}"}
    done = rig.run(argv, cwd=job.folder, env=environ, timeout=120)
    if done.returncode != 0:
        raise NotMeasured(f"submitit: {done.stderr.strip().splitlines()[-1:]}")
    job.job = rig.track(done.stdout.split()[-1])


LAUNCHERS: dict[str, tuple[Callable[[Any, Any, tuple[str, ...]], None], str, str]] = {
    "ours": (_ours, "-m hpc.node", "-m hpc.launch"),
    "a hand-written srun": (_by_hand, "leave.py", "srun"),
    "torchrun": (_torchrun, "torchrun", "srun"),
    "submitit": (_submitit, "submitit.core._submit", "srun"),
}


def _text(who: str, track: str) -> str:
    return f"runs that leave something, proctrack/{track}" + ("" if who == "ours" else f": {who}")


def _measured(who: str, track: str) -> Callable[[Bench], Iterator[Row]]:
    def run(bench: Bench) -> Iterator[Row]:
        rig = _cluster(bench, track)
        import leftover_rig

        launch, agent, controller = LAUNCHERS[who]
        runs = bench.turns or (2 if bench.quick else RUNS if who == "ours" else 3)
        left, total, kinds = Counter[str](), 0, leftover_rig.ends(agent, controller)
        words = dict[str, str]()
        for end in kinds:
            for _ in range(runs):
                found = _one(rig, leftover_rig, launch, end)
                total += 1
                if found:
                    left[end.name] += 1
                    words[end.name] = ", ".join(f"{number} {name}" for name, number in found.count().items() if number)
        told = "; ".join(f"{name} {number}/{runs} ({words[name]})" for name, number in left.items()) or "none"
        what = _text(who, track)
        yield Row(
            what=f"{what} ({total} runs, {len(kinds)} kinds of end)",
            against=f"counted: {told}" if who != "ours" else "counted",
            ratio=float(sum(left.values())),
            goal=0 if who == "ours" else None,
            reason=told,
        )

    return run


def _one(rig: Any, leftover_rig: Any, launch: Callable[..., None], end: Any) -> Any:
    job = leftover_rig.Leaver(rig, end.kind)
    try:
        launch(rig, job, tuple(end.submit))
        job.ready()
        return leftover_rig.outcome(job, end)
    except AssertionError as error:
        raise NotMeasured(f"{end.name}: {str(error).strip().splitlines()[0][:200]}") from None
    finally:
        rig.cancel_jobs()
        job.close()
        if end.breaks_node:
            rig.devcluster("up")


def _cluster(bench: Bench, track: str) -> Any:
    """The bench's cluster, with this way of tracking processes; it is made anew where it has the other."""
    rig = bench.rig()
    if rig.shape.proctrack != track:
        shape = rig.shape
        rig.devcluster("down")
        rig.devcluster(
            "up", "--nodes", str(shape.nodes), "--gpus-per-node", str(shape.gpus_per_node), "--proctrack", track
        )
        os.environ["SLURM_CONF"] = str(rig.slurm_conf)
    return rig


MEASUREMENTS = [
    Measurement([_text(who, track)], _measured(who, track), needs_slurm=True)
    for track in ("linuxproc", "cgroup")
    for who in LAUNCHERS
]
