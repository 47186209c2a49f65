"""The contestants of the rows about saving, each set in one process that alternates between them; the result as JSON.

python saves.py stall|durable FOLDER ROUNDS      seconds of each contestant, state of 256 MiB
python saves.py pace FOLDER ROUNDS RANKS         steps/s during each save and beside it, RANKS processes of one thread
python saves.py kills FOLDER TIMES               kill -9 at random moments of a save: how many ended wrong
python saves.py damages FOLDER TIMES             random damages: not noticed, invented, and passed by torch.load
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BENCH = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(BENCH / "rivals"), str(BENCH / "parts"), str(BENCH.parent.parent)]

import torch_save  # noqa: E402
from frame import alternating  # noqa: E402
from harm import harm  # noqa: E402

from hpc.train.checkpoint import CONFIG, MANIFEST, MODEL, TRAINER, Checkpoints, damage, read  # noqa: E402
from hpc.train.saving import Saving  # noqa: E402

MIB = 1 << 20
WARM_UP = 2
"""Saves of each contestant that do not count: memory is kept from the second one on."""


def state(mib: int = 256, value: float | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of a quarter of the size, and an optimizer with two moments and the gradients' mean for each weight."""
    each = mib * MIB // 4 // 32
    tensors = [torch.full((each,), value) if value is not None else torch.randn(each) for _ in range(32)]
    model = {f"layer.{number}.weight": tensor for number, tensor in enumerate(tensors[:8])}
    moments = {number: {"exp_avg": tensor} for number, tensor in enumerate(tensors[8:])}
    return model, {"position": {"step": 1}, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}


def saving(folder: Path, keep: int = 2) -> Saving:
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    checkpoints.prepare()
    return Saving(checkpoints, "train:\n  seed: 0\n")


class Contest:
    """The same state, saved by each contestant in turn; each into a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.trainer = state()
        self.ours = saving(folder)
        self.step = 0
        self.kept: list[torch.Tensor] = []

    def stall_of_ours(self) -> float:
        self.step += 1
        seconds = self.ours.begin(self.step, self.model, self.trainer)
        self.ours.finish()
        return seconds

    def durable_of_ours(self) -> float:
        self.stall_of_ours()
        assert self.ours.last is not None and self.ours.last.step == self.step
        return self.ours.last.seconds

    def bare_copy(self) -> float:
        """The floor of any save that waits for a copy: tensor by tensor into memory that has been touched before."""
        moments = [moment["exp_avg"] for moment in self.trainer["optimizer"]["state"].values()]
        tensors = [*self.model.values(), *moments]
        if not self.kept:
            self.kept = [tensor.clone() for tensor in tensors]
        return timed(lambda: [kept.copy_(tensor) for kept, tensor in zip(self.kept, tensors, strict=True)])

    def torch_save(self) -> float:
        return timed(lambda: torch_save.save(self.both, self.folder / "state.pt"))

    def torch_save_durably(self) -> float:
        return timed(lambda: torch_save.save_durably(self.both, self.folder / "state.pt"))

    def dcp_async(self) -> float:
        import dcp_async  # late: its import takes seconds

        if not dist.is_initialized():
            dcp_async.start(self.folder)
        target = self.folder / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        begun = time.perf_counter()
        future = dcp_async.save(self.both, target)
        seconds = time.perf_counter() - begun
        future.result()
        return seconds

    @property
    def both(self) -> dict[str, Any]:
        return {"model": self.model, "trainer": self.trainer}


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def contest(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn, name in enumerate(alternating(list(contestants), WARM_UP + rounds)):
        os.sync()  # so that nobody pays for what another left to the disk
        seconds = contestants[name]()
        if turn >= WARM_UP * len(contestants):
            found[name].append(seconds)
    return found


def stall(folder: Path, rounds: int) -> dict[str, list[float]]:
    it = Contest(folder)
    contestants = {"ours": it.stall_of_ours, "torch.save": it.torch_save, "dcp": it.dcp_async, "copy": it.bare_copy}
    return contest(contestants, rounds)


def durable(folder: Path, rounds: int) -> dict[str, list[float]]:
    it = Contest(folder)
    return contest({"ours": it.durable_of_ours, "torch.save": it.torch_save_durably}, rounds)


# --- steps/s ---------------------------------------------------------------------------------------------------------


def pace(folder: Path, rounds: int, ranks: int) -> dict[str, list[float]]:
    """Steps/s of DDP ranks during each save, and beside it (the mean of before and after); the ranks are forked, rank 0 is
    this process."""
    children = []
    for rank in range(1, ranks):
        child = os.fork()
        if child == 0:
            try:
                _pace(folder, rounds, rank, ranks)
            finally:
                os._exit(0)
        children.append(child)
    found = _pace(folder, rounds, 0, ranks)
    for child in children:
        os.waitpid(child, 0)
    return found


def _pace(folder: Path, rounds: int, rank: int, ranks: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model: nn.Module = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(384, 384), nn.Tanh())])
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(64, 384)
    go_on = torch.ones(1)
    saves = saving(folder) if rank == 0 else None
    saved = state() if rank == 0 else None
    found: dict[str, list[float]] = {"without": [], "during": []}

    def steps(until: Callable[[], bool]) -> float:
        """Steps/s until rank 0 has enough, which all ranks hear every fifth step."""
        begun, count = time.perf_counter(), 0
        while True:
            for _ in range(5):
                wrapped(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            count += 5
            go_on[0] = float(rank != 0 or not until())
            if ranks > 1:
                dist.broadcast(go_on, 0)
            if not go_on.item():
                return count / (time.perf_counter() - begun)

    def without(seconds: float) -> float:
        os.sync()
        end = time.perf_counter() + seconds
        return steps(lambda: time.perf_counter() >= end)

    last_s = 1.0
    before = without(last_s)
    for turn in range(WARM_UP + rounds):
        os.sync()
        if saves is not None and saved is not None:
            saves.begin(turn, *saved)
            during = steps(lambda: not saves.under_way)
            saves.finish()
            last_s = saves.last.seconds if saves.last else last_s
        else:
            during = steps(lambda: False)
        after = without(min(5.0, last_s))
        if turn >= WARM_UP:
            found["during"].append(during)
            found["without"].append((before + after) / 2)
        before = after
    dist.destroy_process_group()
    return found


# --- kill -9 and damage ----------------------------------------------------------------------------------------------


def kills(folder: Path, times: int) -> dict[str, Any]:
    """Fork a process that resumes and saves, kill it at some moment of that; the newest whole one has to be the next's."""
    chance, wrong, first, durable_step, longest_s = random.Random(4), 0, "", 0, 0.0
    checkpoints = Checkpoints(folder / "checkpoints")
    moments = {"before": 0, "during": 0, "after": 0}
    for number in range(times + 3):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            _save_once(folder, theirs)
        os.close(theirs)
        os.read(ours, 1)  # the save begins
        begun = time.perf_counter()
        if number < 3:  # how long a save takes
            os.read(ours, 1)
            longest_s = max(longest_s, time.perf_counter() - begun)
        else:
            time.sleep(chance.random() * 1.2 * longest_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = number < 3 or os.read(ours, 1) == b"d"
        os.close(ours)
        half = any(entry.name.startswith(".step") for entry in os.scandir(checkpoints.folder))
        moments["after" if told else "during" if half else "before"] += number >= 3
        fault = _fault(checkpoints, durable_step + told, durable_step + 1)
        if fault:
            wrong, first = wrong + 1, first or fault
        durable_step = checkpoints.steps()[-1]
    return {"wrong": wrong, "first": first, "moments": moments}


def _save_once(folder: Path, told: int) -> None:
    """The child: as a run that resumes at the newest whole checkpoint, takes a step and saves."""
    code = 1
    try:
        torch.set_num_threads(1)
        saves = saving(folder)
        newest = Checkpoints(folder / "checkpoints").newest()
        step = 1 + (read(newest)[1]["position"]["step"] if newest else 0)
        model, trainer = state(8, float(step))
        trainer["position"]["step"] = step
        os.write(told, b"b")
        saves.begin(step, model, trainer)
        saves.finish()
        os.write(told, b"d")
        time.sleep(60)
        code = 0
    finally:
        os._exit(code)


def _fault(checkpoints: Checkpoints, least: int, most: int) -> str:
    """What is wrong with what the next attempt would go on from; it has to be a step from `least` to `most`."""
    newest = checkpoints.newest()
    if newest is None:
        return "no checkpoint is left"
    model, trainer = read(newest)
    step = trainer["position"]["step"]
    if newest.name != f"step-{step}" or not least <= step <= most:
        return f"{newest.name} is used, which says step {step}; step {least} to {most} was needed"
    values = {float(value) for tensor in model.values() for value in tensor.unique()}
    return "" if values == {float(step)} else f"{newest.name} holds the weights of {values}"


def damages(folder: Path, times: int) -> dict[str, Any]:
    chance, checkpoints = random.Random(9), Checkpoints(folder / "checkpoints")
    checkpoints.prepare()
    for step in (1, 2):
        model = {f"layer.{number}.weight": torch.randn(2000) for number in range(8)}
        trainer = {"position": {"step": step}, "moments": [torch.randn(2000) for _ in range(8)]}
        checkpoints.write(step, model, trainer, f"train:\n  max_steps: {step}\n")
    target, whole = checkpoints.path(2), folder / "whole"
    shutil.copytree(target, whole)
    missed = invented = silent = 0
    first = ""
    for _ in range(times):
        shutil.rmtree(target)
        shutil.copytree(whole, target)
        invented += damage(target) is not None
        done = harm(target, checkpoints.path(1), (MODEL, TRAINER, CONFIG, MANIFEST), chance)
        if damage(target) is None:
            missed, first = missed + 1, first or done
        silent += _torch_loads(target)
    return {"missed": missed, "invented": invented, "silent": silent, "first": first}


def _torch_loads(path: Path) -> bool:
    try:
        read(path)
    except Exception:  # whatever it is that torch notices it by
        return False
    return True


def main() -> None:
    logging.getLogger("hpc.train").setLevel(logging.CRITICAL)
    what, folder, *rest = sys.argv[1:]
    known: dict[str, Callable[..., Any]] = {"stall": stall, "durable": durable, "pace": pace}
    known |= {"kills": kills, "damages": damages}
    found = known[what](Path(folder), *map(int, rest))
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # DCP leaves threads that nobody ends


if __name__ == "__main__":
    main()
