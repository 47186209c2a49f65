"""It comes back by itself: what saving costs, and what is left after a kill or a damage; against what people use now."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comebacks
from frame import ROOT, Bench, Measurement, NotMeasured, Row, alternating, compared

PARTS = Path(__file__).resolve().parent / "parts"

# --- saving: one process per row, which alternates between the contestants (parts/saves.py) --------------------------

STALL = "training stands still for a save of 256 MiB, from the second on"
DURABLE = "a save of 256 MiB is durable, checksum included"
PACE = "time of a step while a save of 256 MiB is written"


def saves(bench: Bench, what: str, *numbers: int) -> dict[str, Any]:
    """What parts/saves.py has found."""
    words = [bench.python, str(PARTS / "saves.py"), what, str(bench.scratch()), *map(str, numbers)]
    done = subprocess.run(words, env=bench.environ(), capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode != 0:
        raise NotMeasured(f"parts/saves.py {what} failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def stalls(bench: Bench) -> Iterator[Row]:
    found = saves(bench, "stall", 4 if bench.quick else 15)
    load, cores = os.getloadavg()[0], os.cpu_count()
    copied = (
        f"ours took {_range(found['ours'])}, a bare copy of 256 MiB into kept memory {_range(found['copy'])}, with {load:.1f} "
        f"processes that want to run on {cores} cores"
    )
    yield compared(STALL, "torch.save on rank 0", found["ours"], found["torch.save"], 0.1, copied)
    yield compared(STALL, "DCP async_save", found["ours"], found["dcp"], 1 / 3, copied)


def durable(bench: Bench) -> Iterator[Row]:
    found = saves(bench, "durable", 4 if bench.quick else 15)
    reason = f"ours took {_range(found['ours'])}, theirs {_range(found['torch.save'])}: the disk decides"
    yield compared(
        DURABLE, "torch.save + fsync + rename, no checksum", found["ours"], found["torch.save"], 1.15, reason
    )


def paces(bench: Bench) -> Iterator[Row]:
    """Steps/s with a save are to be at least 0.85 of those without, so a step may take 1/0.85 of its time."""
    for ranks in (1, 2):
        found = saves(bench, "pace", 4 if bench.quick else 15, ranks)
        during, without = ([1 / rate for rate in found[name]] for name in ("during", "without"))
        cores = f"{ranks} rank{'s' * (ranks > 1)} of one thread on {os.cpu_count()} cores"
        reason = f"a step took {_range(during)} during a save and {_range(without)} without"
        yield compared(f"{PACE}, {cores}", "without a save", during, without, 1 / 0.85, reason)


# --- what is left after a kill or a damage ---------------------------------------------------------------------------

KILLED = "kill -9 at some moment of a save: the newest whole one is not used"
DAMAGED = "damages of a checkpoint: not noticed, or invented"


def killed(bench: Bench) -> Iterator[Row]:
    times = 40 if bench.quick else 200
    found = saves(bench, "kills", times)
    when = ", ".join(f"{count} {moment}" for moment, count in found["moments"].items())
    yield Row(
        what=f"{KILLED}, of {times} ({when} the write)",
        against="counted",
        ratio=found["wrong"],
        goal=0,
        reason=f"the first: {found['first']}",
    )


def damaged(bench: Bench) -> Iterator[Row]:
    times = 200 if bench.quick else 1600
    found = saves(bench, "damages", times)
    yield Row(
        what=f"{DAMAGED}, of {times}",
        against=f"counted; torch.load takes {found['silent']} of them in silence",
        ratio=found["missed"] + found["invented"],
        goal=0,
        reason=f"the first that was not noticed: {found['first']}; invented: {found['invented']}",
    )


# --- the interval that a run chooses ---------------------------------------------------------------------------------

OVERHEAD = "overhead of saving at the interval it chose by itself"
FAILURES = 10


def overhead(bench: Bench) -> Iterator[Row]:
    """jobs.gpt with and without saves in between, from the first to the last step. The record of each run tells of ten
    failures, one a minute, so that the interval is as short as it can get."""
    rounds, steps = (1, 250) if bench.quick else (6, 1500)
    seconds: dict[str, list[float]] = {"saving": [], "not": []}
    counts, told = [], ""
    for who in alternating(list(seconds), rounds):
        folder = _failed_run(bench.scratch() / "run")
        words = ["-m", "hpc.train", "jobs.gpt", f"run_dir={folder}", f"train.max_steps={steps}", "train.epochs=100"]
        words += ["model.layers=3", "model.width=192", "model.heads=4", "data.context=64", "data.held_out=0"]
        words += ["data.max_bytes=1000000", "train.batch_size=2", "train.loader_workers=0", "train.log_every_steps=5"]
        words += ["train.device=cpu", "train.threads=1", *(["train.save_every_s=0"] if who == "not" else [])]
        environ = bench.environ(HPC_RUN_DIR=str(folder))
        os.sync()
        done = subprocess.run(
            [bench.python, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode != 0:
            raise NotMeasured(f"jobs.gpt failed: {done.stderr.strip().splitlines()[-1:]}")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        times = [line["time"] for line in lines if line["kind"] == "train"]
        seconds[who].append(times[-1] - times[0])
        if who == "saving":
            events = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
            counts.append(sum(event["event"] == "saved" for event in events) - 2)  # the record's own, and the last one
            told = next((line for line in done.stdout.splitlines() if line.startswith("saving every")), told)
    ours, theirs = statistics.median(seconds["saving"]), statistics.median(seconds["not"])
    yield Row(
        what=f"{OVERHEAD} ({statistics.mean(counts):.0f} saves in {ours:.0f} s)",
        against="no saving, as a share of its time",
        ratio=ours / theirs - 1,
        goal=0.02,
        ours_s=ours,
        theirs_s=theirs,
        reason=f"{_range(seconds['saving'])} with and {_range(seconds['not'])} without, which is what this machine's "
        f"speed varies by; {told}",
    )


def _failed_run(folder: Path) -> Path:
    """A run directory whose record tells of failures, and of a save that cost a tenth of a second."""
    folder.mkdir(mode=0o700)
    now = time.time() - 61 * FAILURES
    events: list[dict[str, Any]] = []
    for number in range(FAILURES):
        begun = now + 61 * number
        events += [{"time": begun, "event": "resumed"}, {"time": begun + 60, "event": "ended"}]
    events.insert(-1, {"time": now + 61 * FAILURES - 30, "event": "saved", "stall_s": 0.05, "seconds": 0.5})
    (folder / "record.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def _range(seconds: list[float]) -> str:
    return f"{min(seconds) * 1000:.0f}-{max(seconds) * 1000:.0f} ms"


SAVING = [
    Measurement([STALL], stalls),
    Measurement([DURABLE], durable),
    Measurement([PACE], paces),
    Measurement([KILLED], killed),
    Measurement([DAMAGED], damaged),
    Measurement([OVERHEAD], overhead),
]

# --- runs on the dev cluster that are killed, stopped or told to go (parts/comebacks.py) -----------------------------

AGAIN = "kill -9 of a worker to the first new step, 1 x 4 ranks"
BESIDE_TORCHRUN = "the same kill -9 to the first new step"
DEAD = "kill -9 of a worker until all ranks of that start are gone"
STOPPED = "SIGSTOP of a worker until it is called stopped"
LOST = "steps lost by kill -9 of a worker"
GONE = "notice to the last process gone, less the save, 2 x 4 ranks"
REQUEUED = "requeue to the first new step, less Slurm's wait"
LOST_BY_NOTICE = "steps lost by a notice"
EVERY = 7  # the save interval of the tests' job
ONE_NODE = ("--nodes", "1", "--gpus-per-node", "4")


def restarts(bench: Bench) -> Iterator[Row]:
    """Each goal as a bound in seconds: the ratio is to it, so that 1 is met."""
    chance = random.Random(4)
    ours = []
    for _ in range(bench.turns or (2 if bench.quick else 8)):
        with comebacks.drill(bench, *ONE_NODE) as run:
            ours.append(comebacks.hurt(run, signal.SIGKILL, 14 + chance.randrange(EVERY)))
    cold, again, gone = ([turn[name] for turn in ours] for name in ("cold", "again", "noticed"))
    bound = [seconds + 3 for seconds in cold]
    reason = f"{_range(again)}, cold {_range(cold)}; 2 s are the pause before a restart"
    yield compared(AGAIN, "a cold start of ours + 3 s", again, bound, 1.0, reason)
    yield compared(DEAD, "2 s", gone, [2.0], 1.0, _range(gone))
    lost = [turn["lost"] for turn in ours]
    what = f"{LOST}, on average, of {EVERY} between two saves ({len(lost)} runs)"
    yield Row(what=what, against="save interval", ratio=statistics.mean(lost) / EVERY, goal=0.6, reason=f"{lost}")
    what = f"{LOST}, more than an interval, of {len(lost)} runs"
    yield Row(what=what, against="counted", ratio=sum(steps > EVERY for steps in lost), goal=0, reason=f"{lost}")


def beside_torchrun(bench: Bench) -> Iterator[Row]:
    ours, rival = [], []
    for who in alternating(["torchrun", "ours"], bench.turns or (2 if bench.quick else 8)):
        if who == "torchrun":
            rival.append(comebacks.torchrun(bench))
        else:
            with comebacks.drill(bench, *ONE_NODE) as run:
                ours.append(comebacks.hurt(run, signal.SIGKILL, 16)["again"])
    reason = f"{_range(ours)} and {_range(rival)}; 2 s of ours are the pause before a restart"
    yield compared(BESIDE_TORCHRUN, "torchrun --max-restarts", ours, rival, 0.5, reason)


def stops(bench: Bench) -> Iterator[Row]:
    found = []
    for _ in range(bench.turns or (1 if bench.quick else 5)):
        with comebacks.drill(bench, *ONE_NODE) as run:
            found.append(comebacks.hurt(run, signal.SIGSTOP, 16)["noticed"])
    yield compared(STOPPED, "10 s", found, [10.0], 1.0, f"{_range(found)}; the agent looks once a second")


def notices(bench: Bench) -> Iterator[Row]:
    found = []
    for _ in range(bench.turns or (2 if bench.quick else 20)):
        with comebacks.drill(bench, "--nodes", "2", "--gpus-per-node", "4") as run:
            found.append(comebacks.told(run))
    cold, again, gone = ([turn[name] for turn in found] for name in ("cold", "again", "gone"))
    yield compared(GONE, "5 s", gone, [5.0], 1.0, _range(gone))
    bound = [1.1 * seconds + 2 for seconds in cold]
    yield compared(REQUEUED, "1.1 x a cold start + 2 s", again, bound, 1.0, f"{_range(again)}, cold {_range(cold)}")
    lost = [turn["lost"] for turn in found]
    what = f"{LOST_BY_NOTICE}, runs of {len(lost)} that lost any"
    yield Row(what=what, against="counted", ratio=sum(steps != 0 for steps in lost), goal=0, reason=f"{lost}")


COMING_BACK = [
    Measurement([AGAIN, DEAD, LOST], restarts, needs_slurm=True),
    Measurement([BESIDE_TORCHRUN], beside_torchrun, needs_slurm=True),
    Measurement([STOPPED], stops, needs_slurm=True),
    Measurement([GONE, REQUEUED, LOST_BY_NOTICE], notices, needs_slurm=True),
]
MEASUREMENTS = [*SAVING, *COMING_BACK]
