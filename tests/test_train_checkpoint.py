"""Checkpoints: whole or not there, the newest by number, nothing pickled, a damaged one named and skipped."""

from __future__ import annotations

import collections
import errno
import json
import logging
import math
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_server import Ranks

from hpc.errors import ConfigError
from hpc.train import checkpoint
from hpc.train.best import Best
from hpc.train.checkpoint import CheckpointError, Checkpoints, damage, read, require_plain


def state(value: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((500,), value)}


def written(folder: Path, *steps: int, keep: int = 10) -> Checkpoints:
    checkpoints = Checkpoints(folder / "checkpoints", keep)
    checkpoints.prepare()
    for step in steps:
        checkpoints.write(step, state(step), {"position": {"step": step}})
    return checkpoints


def test_what_is_written_is_read(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 3)
    path = checkpoints.newest()
    assert path == tmp_path / "checkpoints/step-3" and damage(path) is None
    model, trainer = read(path)
    assert torch.equal(model["weight"], state(3)["weight"]) and trainer == {"position": {"step": 3}}
    assert sorted(os.listdir(path)) == ["manifest.json", "model.pt", "trainer.pt"]
    path = checkpoints.write(4, state(3), {}, "train:\n  seed: 3\n")
    assert checkpoint.configuration(path) == "train:\n  seed: 3\n" and damage(path) is None
    assert sorted(os.listdir(path)) == ["config.yaml", "manifest.json", "model.pt", "trainer.pt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_k04_the_newest_is_chosen_by_number(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 2, 9, 10, 100)
    assert checkpoints.newest() == checkpoints.path(100)
    assert checkpoints.steps() == [2, 9, 10, 100]


def test_the_newest_are_kept_and_only_they(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 9, 10, 11, 100, keep=2)
    assert checkpoints.steps() == [11, 100]
    assert sorted(os.listdir(checkpoints.folder)) == ["step-100", "step-11"]


@pytest.mark.parametrize(("mode", "expected"), [("max", [30, 50]), ("min", [20, 50])])
def test_k24_the_best_is_kept_and_of_equal_ones_the_later(tmp_path: Path, mode: str, expected: list[int]) -> None:
    best = Best("accuracy", mode)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, best=best)
    checkpoints.prepare()
    for step, value in ((9, 0.9), (10, 0.3), (20, 0.3), (30, 0.9), (40, math.nan), (50, 0.6)):
        checkpoints.write(step, state(step), {"position": {"step": step}})
        best.note(step, {"loss": 1.0, "accuracy": value})
        assert checkpoints.best_step() == best.of(checkpoints.steps())
    assert checkpoints.steps() == expected
    assert checkpoints.newest() == checkpoints.path(50), "a run goes on from the newest one, whatever the best one is"


def test_a_best_metric_that_the_evaluation_does_not_give_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="train.best_metric=acuracy: .* gives loss, accuracy; did you mean accuracy"):
        Best("acuracy", "max").note(7, {"loss": 1.0, "accuracy": 0.5})


@pytest.mark.slow
def test_k24_the_best_checkpoint_of_a_run_outlives_its_restarts(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", "run_dir=run", "train.epochs=4", "train.keep_checkpoints=1", "train.best_metric=error")
    arguments += ("train.best_mode=max", "optimizer=adamw", "lr=0.05")
    assert 41 in ranks(tmp_path, *arguments, "trouble=exit", "trouble_step=4", ranks=2).codes
    last = ranks(tmp_path, *arguments, ranks=2).check().logs[0].splitlines()[-1]
    found = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    errors = {line["step"]: line["error"] for line in found if line["kind"] == "eval"}
    best = max(errors, key=lambda step: errors[step])
    assert best < max(errors) == 4, "this trial is to have its best checkpoint early"
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [best, 4]
    assert last.endswith(f"; best error {errors[best]:.4g}: run/checkpoints/step-{best}")


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 1, 2)
    (checkpoints.path(2) / "manifest.json").unlink()
    checkpoints.keep = 2
    checkpoints.write(3, state(), {})
    assert checkpoints.steps() == [1, 2, 3]


@pytest.mark.parametrize("keep", [1, 2])
def test_later_ones_with_wrong_bytes_do_not_drive_out_those_written_after_a_return_to_an_earlier_one(
    tmp_path: Path, keep: int
) -> None:
    before = written(tmp_path, 10, 20, 30)
    for step in (20, 30):
        spoil_bit(before.path(step))
    checkpoints = Checkpoints(before.folder, keep)
    assert checkpoints.newest() == checkpoints.path(10)
    for step in (12, 14, 20):
        checkpoints.write(step, state(step), {})
        assert Checkpoints(before.folder, keep).newest() == checkpoints.path(step)
    assert checkpoints.steps() == [14, 20, 30][2 - keep :]


def spoil_bit(path: Path) -> None:
    data = bytearray((path / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.pt").write_bytes(data)


def spoil_length(path: Path) -> None:
    os.truncate(path / "trainer.pt", 10)


def spoil_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "files": {"model.pt"')


def spoil_missing(path: Path) -> None:
    (path / "model.pt").unlink()


def spoil_unfinished(path: Path) -> None:
    (path / "manifest.json").unlink()


def spoil_version(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (spoil_bit, "SHA-256"),
        (spoil_length, "has 10 bytes of"),
        (spoil_manifest, "cannot be read"),
        (spoil_missing, "model.pt"),
        (spoil_unfinished, "never finished"),
        (spoil_version, "format 99"),
    ],
)
def test_k03_a_damaged_one_is_named_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, spoil: Any, word: str
) -> None:
    monkeypatch.setattr(logging.getLogger("hpc.train"), "propagate", True)
    checkpoints = written(tmp_path, 9, 10)
    spoil(checkpoints.path(10))
    assert checkpoints.newest() == checkpoints.path(9)
    assert "step-10" in caplog.text and word in caplog.text
    spoil(checkpoints.path(9))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        checkpoints.newest()


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest() is None
    assert written(tmp_path).newest() is None


def test_unfinished_folders_never_count_and_are_cleared(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 5)
    stale = checkpoints.folder / ".step-50.123.tmp"
    os.rename(checkpoints.path(5), stale)  # whole, but never published
    (checkpoints.folder / "step-latest").mkdir()
    assert checkpoints.newest() is None
    checkpoints.prepare()
    assert os.listdir(checkpoints.folder) == ["step-latest"]


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    checkpoints = written(tmp_path, 5)
    spoil_bit(checkpoints.path(5))
    checkpoints.write(5, state(7), {})
    assert damage(checkpoints.path(5)) is None
    assert torch.equal(read(checkpoints.path(5))[0]["weight"], state(7)["weight"])
    assert os.listdir(checkpoints.folder) == ["step-5"]


def test_a_full_disk_leaves_the_ones_before_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = written(tmp_path, 5)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.write(6, state(), {})
    assert os.listdir(checkpoints.folder) == ["step-5"] and checkpoints.newest() == checkpoints.path(5)


@pytest.mark.parametrize(("number", "is_fault"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_borne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fault: bool
) -> None:
    checkpoints, sync = written(tmp_path, 5), os.fsync

    def no_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    if is_fault:
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            checkpoints.write(6, state(), {})
    else:
        checkpoints.write(6, state(), {})
    assert checkpoints.newest() == checkpoints.path(5 if is_fault else 6)


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), lambda: 0, collections.namedtuple("Pair", "a b")(1, 2), range(3)])
def test_what_safe_loading_would_refuse_is_refused_when_saving(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"trainer\.scheduler\.items\[1\] is a "):
        written(tmp_path).write(1, state(), {"scheduler": {"items": [1, value]}})


def test_what_passes_as_plain_does_load_safely(tmp_path: Path) -> None:
    values = {
        "numbers": [1, 2.5, True, None, 1j, b"x", "ü"],
        "tuple": (1, (2, 3)),
        "set": {1, 2},
        "counter": collections.Counter([3, 3]),
        "ordered": collections.OrderedDict(a=1),
        "torch": [torch.float16, torch.Size([2]), torch.device("cpu")],
        7: torch.arange(3),
    }
    checkpoints = written(tmp_path)
    require_plain(values, "values")
    checkpoints.write(1, state(), values)
    loaded = read(checkpoints.path(1))[1]
    assert torch.equal(loaded.pop(7), values.pop(7)) and loaded == values


def test_k12_a_checkpoint_of_gpu_tensors_is_read_into_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from there each rank fills its own device: nothing is put on the GPU that a tensor was saved from."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        path = written(tmp_path, 3).path(3)
    with pytest.raises(RuntimeError, match="CUDA"):  # what torch.load makes of it by itself
        torch.load(path / "model.pt")
    assert damage(path) is None
    assert read(path)[0]["weight"].device.type == "cpu"


@pytest.mark.slow
def test_k13_a_checkpoint_of_a_real_run_loads_with_the_default_loader(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", "run_dir=run", "optimizer=adamw", "dropout=0.1", ranks=2).check()
    path = Checkpoints(tmp_path / "run/checkpoints").newest()
    assert path is not None
    model, trainer = torch.load(path / "model.pt"), torch.load(path / "trainer.pt")
    assert not any(name.startswith("module.") for name in model)
    named = {"position", "optimizer", "scheduler", "scaler", "hyperparameters", "random", "data", "total", "made_with"}
    assert set(trainer) == named
    assert len(trainer["random"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(6))
def test_k01_a_kill_at_any_moment_leaves_a_whole_checkpoint(ranks: Ranks, tmp_path: Path, moment: int) -> None:
    arguments = ("toy", "run_dir=run", "train.save_every_steps=1", "train.epochs=100", "train.batch_size=8")
    arguments += ("ballast_mib=4", "held_out=0", "slow_sync_s=0.05")
    moments = random.Random(moment)
    folder, best, kills, patience = tmp_path / "run/checkpoints", 0, 0, 1.0
    while kills < 3 or not best:
        trial = ranks(tmp_path, *arguments, kill_after_s=patience * (0.6 + 1.2 * moments.random()))
        assert trial.codes == [-9]
        newest = Checkpoints(folder).newest() if folder.exists() else None
        step = 0 if newest is None else read(newest)[1]["position"]["step"]
        assert step >= best and (newest is None or newest.name == f"step-{step}")
        if best and step > best:
            assert f"resuming at step {best} of" in trial.logs[0]
        kills, best, patience = kills + 1, step, patience * (1.0 if step else 1.7)  # a busy machine starts slowly
        assert patience < 30, trial.text()


@pytest.mark.slow
def test_x01_k21_only_rank_zero_makes_folders(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", "run_dir=run", "only_zero_makes_folders=true", "train.save_every_steps=2", "train.batch_size=8")
    ranks(tmp_path, *arguments, ranks=2).check()
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [4, 5]
    assert checkpoint.damage(tmp_path / "run/checkpoints/step-5") is None


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", "run_dir=run", ranks=2).check()
    spoil_bit(tmp_path / "run/checkpoints/step-1")
    refused = ranks(tmp_path, "toy", "run_dir=run", ranks=2)
    assert refused.codes == [1, 1]
    assert "step-1 is damaged" in refused.logs[0] and "none of the 1 checkpoints" in refused.logs[0].splitlines()[-1]
    assert refused.logs[1] == ""
