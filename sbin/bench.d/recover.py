"""It comes back by itself: what saving costs, and what is left after a kill or a damage; against what people use now."""

from __future__ import annotations

import bisect
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comebacks
import losses
import race
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
    copied = (
        f"ours took {_range(found['ours'])}, a bare copy of 256 MiB into kept memory {_range(found['copy'])}; {_load()}"
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
        found = saves(bench, "pace", 8 if bench.quick else 25, ranks)
        ratios = [beside / during for during, beside in zip(found["during"], found["without"], strict=True)]
        during, without = ([1 / rate for rate in found[name]] for name in ("during", "without"))
        cores = f"{ranks} rank{'s' * (ranks > 1)} of one thread on {os.cpu_count()} cores"
        yield Row(
            what=f"{PACE}, {cores}",
            against="before and after it, median of the pairs",
            ratio=statistics.median(ratios),
            goal=1 / 0.85,
            ours_s=statistics.median(during),
            theirs_s=statistics.median(without),
            reason=f"presumably writing and checksum, which take time of a core that the ranks need: a pair's ratio was {_quartiles(ratios)}; {_load()}",
        )


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
AFTER = 3
"""Steps after a save is durable that count for it: it removes an old one then."""


def overhead(bench: Bench) -> Iterator[Row]:
    """jobs.gpt on one core; its record tells of ten failures, one a minute, so that the interval is as short as it can get.

    Each save's steps are held against as many just before and just after them: what others do to the machine meets both.
    """
    folder, steps = _failed_run(bench.scratch() / "run"), 2500 if bench.quick else 12000
    words = ["-m", "hpc.train", "jobs.gpt", f"run_dir={folder}", f"train.max_steps={steps}", "train.epochs=100"]
    words += ["model.layers=3", "model.width=192", "model.heads=4", "data.context=64", "data.held_out=0"]
    words += ["data.max_bytes=1000000", "train.batch_size=2", "train.loader_workers=0", "train.log_every_steps=1"]
    words += ["train.device=cpu", "train.threads=1"]
    os.sync()
    done = subprocess.run(
        [bench.python, *words], cwd=ROOT, env=bench.environ(HPC_RUN_DIR=str(folder)), capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise NotMeasured(f"jobs.gpt failed: {done.stderr.strip().splitlines()[-1:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [line["time"] for line in lines if line["kind"] == "train"]
    events = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    saved = [event for event in events if event["event"] == "saved"][1:-1]  # without the record's own, and the last one
    costs = [
        cost for event in saved if (cost := _cost(ends, event["time"] - event["seconds"], event["time"])) is not None
    ]
    if len(costs) < 5:
        raise NotMeasured(f"{len(costs)} saves in {steps} steps are too few to tell")
    whole, cost = ends[-1] - ends[0], statistics.median(costs)
    told = [line for line in done.stdout.splitlines() if line.startswith("saving every")]
    yield Row(
        what=f"{OVERHEAD} ({len(saved)} saves in {whole:.0f} s)",
        against="the steps beside each save, as a share of the time",
        ratio=cost * len(saved) / whole,
        goal=0.02,
        ours_s=cost,
        reason=f"a save made its steps longer by {_quartiles([1000 * cost for cost in costs])} ms; {''.join(told[-1:])}; {_load()}",
    )


def _cost(ends: list[float], begun: float, durable: float) -> float | None:
    """By how much the steps of a save took longer than as many beside it; None where another save is too near."""
    first = bisect.bisect_left(ends, begun) - 1
    last = bisect.bisect_left(ends, durable) + AFTER
    count = last - first
    if first - count < 0 or last + count >= len(ends):
        return None
    beside = (ends[first] - ends[first - count] + ends[last + count] - ends[last]) / 2
    return ends[last] - ends[first] - beside


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


def _quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{low:.3g}, {middle:.3g}, {high:.3g} (quartiles of {len(values)})"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f} processes wanted to run on {os.cpu_count()} cores"


# --- runs on the dev cluster that are killed, stopped or told to go (parts/comebacks.py) -----------------------------

AGAIN = "kill -9 of a worker to the first new step, 1 x 4 ranks"
BESIDE_TORCHRUN = "the same kill -9 to the first new step"
DEAD = "kill -9 of a worker until all ranks of that start are gone"
STOPPED = "SIGSTOP of a worker until it is called stopped"
CALM = "restarts in a run whose saves take long, looked at for hangs of 5 s"
GONE = "notice to the last process gone, less the save, 2 x 4 ranks"
REQUEUED = "requeue to the first new step, less Slurm's wait"
ONE_NODE = ("--nodes", "1", "--gpus-per-node", "4")


def restarts(bench: Bench) -> Iterator[Row]:
    """Each goal as a bound in seconds: the ratio is to it, so that 1 is met."""
    chance = random.Random(4)
    ours = []
    for _ in range(bench.turns or (2 if bench.quick else 8)):
        with comebacks.drill(bench, *ONE_NODE) as run:
            ours.append(comebacks.hurt(run, signal.SIGKILL, 14 + chance.randrange(7)))
    cold, again, gone = ([turn[name] for turn in ours] for name in ("cold", "again", "noticed"))
    bound = [seconds + 3 for seconds in cold]
    yield compared(AGAIN, "a cold start of ours + 3 s", again, bound, 1.0, f"{_range(again)}, cold {_range(cold)}")
    yield compared(DEAD, "2 s", gone, [2.0], 1.0, _range(gone))


def beside_torchrun(bench: Bench) -> Iterator[Row]:
    ours, rival, failed = [], [], []
    for who in alternating(["torchrun", "ours"], bench.turns or (2 if bench.quick else 8)):
        if who == "torchrun":
            try:
                rival.append(comebacks.torchrun(bench))
            except NotMeasured as error:
                failed.append(str(error))
        else:
            with comebacks.drill(bench, *ONE_NODE) as run:
                ours.append(comebacks.hurt(run, signal.SIGKILL, 16)["again"])
    if not rival:
        raise NotMeasured(f"torchrun never came back: {failed[-1]}")
    reason = f"{_range(ours)} and {_range(rival)} (torchrun failed to come back {len(failed)} times); ours imports torch once per node and torchrun in each worker"
    yield compared(BESIDE_TORCHRUN, "torchrun --max-restarts", ours, rival, 0.5, reason)


def stops(bench: Bench) -> Iterator[Row]:
    found = []
    for _ in range(bench.turns or (1 if bench.quick else 5)):
        with comebacks.drill(bench, *ONE_NODE) as run:
            found.append(comebacks.hurt(run, signal.SIGSTOP, 16)["noticed"])
    yield compared(STOPPED, "10 s", found, [10.0], 1.0, f"{_range(found)}; the agent looks once a second")


def calm(bench: Bench) -> Iterator[Row]:
    """A save of 20 s, and another that waits for it: heartbeats are looked for all the while."""
    with comebacks.drill(bench, *ONE_NODE, "save_s=5", "launch.hang_timeout_s=5") as run:
        run.reaches(20, saved=7)
        seconds = [event["seconds"] for event in run.events("saved")]
        count = len(run.events("decided"))
        reason = f"{run.decisions()}"
    yield Row(what=f"{CALM} (of {seconds[0]:.0f} s)", against="counted", ratio=count, goal=0, reason=reason)


def notices(bench: Bench) -> Iterator[Row]:
    found, floor = [], comebacks.Floor(bench)
    for _ in range(bench.turns or (2 if bench.quick else 10)):
        with comebacks.drill(bench, "--nodes", "2", "--gpus-per-node", "4") as run:
            found.append(comebacks.told(run, floor))
    cold, again, gone, wait = ([turn[name] for turn in found] for name in ("cold", "again", "gone", "wait"))
    yield compared(GONE, "5 s", gone, [5.0], 1.0, _range(gone))
    bound = [1.1 * seconds + 2 for seconds in cold]
    reason = f"{_range(again)}, cold {_range(cold)}, Slurm's wait {_range(wait)}"
    yield compared(REQUEUED, "1.1 x a cold start + 2 s", again, bound, 1.0, reason)


# --- steps lost (parts/losses.py) ------------------------------------------------------------------------------------

LOST_BY_NOTICE = "runs that lost a step by"
LOST_BY_KILL = "steps lost by"


def lost_by_notice(bench: Bench) -> Iterator[Row]:
    found = losses.Losses(bench).notices(bench.turns or (2 if bench.quick else 20))
    for kind in losses.NOTICES:
        lost = found[kind]
        what = f"{LOST_BY_NOTICE} {kind}, of {len(lost)}"
        yield Row(what=what, against="counted", ratio=sum(steps != 0 for steps in lost), goal=0, reason=f"{lost}")


def lost_by_kill(bench: Bench) -> Iterator[Row]:
    """Steps that were finished and had to be made again."""
    few, many = (2, 1) if bench.quick else (20, 10)
    found = losses.Losses(bench).kills(bench.turns or few, min(bench.turns or many, many))
    every = losses.EVERY
    for kind in losses.KILLS:
        lost = found[kind]
        what = f"{LOST_BY_KILL} {kind}, more than the {every} of an interval, of {len(lost)}"
        yield Row(what=what, against="counted", ratio=sum(steps > every for steps in lost), goal=0, reason=f"{lost}")
    lost = [steps for kind in losses.KILLS for steps in found[kind]]
    what = f"{LOST_BY_KILL} all of these on average ({len(lost)} ends)"
    yield Row(what=what, against="save interval", ratio=statistics.mean(lost) / every, goal=0.6, reason=f"{lost}")


# --- the same faults for all (parts/race.py) -------------------------------------------------------------------------

RACE = "minutes with a fault of a random kind every 60 s"


def races(bench: Bench) -> Iterator[Row]:
    minutes = 3 if bench.quick else 10
    found, cold_s, wait_s = race.race(bench, 60.0 * minutes)
    step_s = min(result.step_s for result in found.values())
    ours = found["ours"]
    queued = {name: sum(hit[0] in race.THROUGH_THE_QUEUE for hit in result.hits) for name, result in found.items()}
    killed = len(ours.hits) - queued["ours"]
    expected_s = len(ours.hits) * cold_s + killed * race.SAVE_S / 2 + queued["ours"] * wait_s
    bound, share = 1 - expected_s / ours.seconds, ours.steps * step_s / ours.seconds
    told = (
        f"{len(ours.hits)} faults ({', '.join(map(_hit, ours.hits))}); of the time {share:.3f} went into steps "
        f"that last; the bound is {bound:.3f} with a cold start of {cold_s:.1f} s, {wait_s:.1f} s of Slurm's, and half of "
        f"{race.SAVE_S:.0f} s between saves after a kill"
    )
    for name, result in found.items():
        print(f"{name}: {result.steps} steps; {', '.join(map(_hit, result.hits))}", file=sys.stderr)
    what = f"{minutes} {RACE}: share of the time in steps that last"
    yield Row(what=what, against="the bound, over ours", ratio=bound / share, goal=1 / 0.95, reason=told)
    lost = {name: result.lost_s(step_s) - queued[name] * wait_s for name, result in found.items()}
    for rival in ("torchrun", "submitit"):
        reason = f"{_where_lost('ours', ours, wait_s, step_s)}; {_where_lost(rival, found[rival], wait_s, step_s)}"
        yield Row(
            what=f"{minutes} {RACE}: time lost, less Slurm's wait",
            against=f"{rival}, a save each {race.SAVE_S:.0f} s",
            ratio=lost["ours"] / lost[rival],
            goal=0.5,
            ours_s=lost["ours"],
            theirs_s=lost[rival],
            reason=reason,
        )


def _where_lost(name: str, result: race.Result, wait_s: float, step_s: float) -> str:
    """In what a contestant's lost time went."""
    queued = [seconds - wait_s for kind, seconds, _ in result.hits if kind in race.THROUGH_THE_QUEUE]
    again = [seconds for kind, seconds, _ in result.hits if kind not in race.THROUGH_THE_QUEUE]
    redone = step_s * sum(steps for _, _, steps in result.hits)
    lost = result.lost_s(step_s) - len(queued) * wait_s
    rest = lost - sum(queued) - sum(again) - redone
    return (
        f"{name} lost {lost:.0f} s: {sum(queued):.0f} s in {len(queued)} starts through the queue, {sum(again):.0f} s in "
        f"{len(again)} others, {redone:.0f} s by steps made again (a save each {race.SAVE_S:.0f} s), {rest:.0f} s otherwise"
    )


def _hit(hit: tuple[str, float, int]) -> str:
    return f"{hit[0]} {hit[1]:.1f} s and {hit[2]} steps"


SAVING = [
    Measurement([STALL], stalls),
    Measurement([DURABLE], durable),
    Measurement([PACE], paces),
    Measurement([OVERHEAD], overhead),
]
COMING_BACK = [
    Measurement([AGAIN, DEAD], restarts, needs_slurm=True),
    Measurement([BESIDE_TORCHRUN], beside_torchrun, needs_slurm=True),
    Measurement([STOPPED], stops, needs_slurm=True),
    Measurement([GONE, REQUEUED], notices, needs_slurm=True),
    Measurement([RACE], races, needs_slurm=True),
]
COUNTED = [
    Measurement([CALM], calm, needs_slurm=True),
    Measurement([KILLED], killed),
    Measurement([DAMAGED], damaged),
    Measurement([LOST_BY_NOTICE], lost_by_notice, needs_slurm=True),
    Measurement([LOST_BY_KILL], lost_by_kill, needs_slurm=True),
]
MEASUREMENTS = [*SAVING, *COMING_BACK, *COUNTED]
"""The counted ones last: what else the machine does then changes no ratio."""
