"""Saves beside the training: what is saved is the state at the save, and a failure is told, with the old one intact."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_server import ROOT, Ranks
from test_train_loop import RUN

from hpc.train import checkpoint
from hpc.train.checkpoint import CheckpointError, Checkpoints, await_visible, damage, read
from hpc.train.hostcopy import HostCopy
from hpc.train.saving import Saved, Saving

sys.path.insert(0, str(ROOT / "sbin" / "bench.d" / "parts"))

from harm import harm


def saving(folder: Path, **more: Any) -> Saving:
    checkpoints = Checkpoints(folder / "checkpoints", keep=10)
    checkpoints.prepare()
    return Saving(checkpoints, **more)


def test_a_copy_is_equal_and_of_its_own() -> None:
    base, module = torch.arange(12.0), torch.nn.BatchNorm1d(3)
    state = {
        "whole": base,
        "rows": base.view(3, 4)[1:],
        "turned": base.view(3, 4).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(7),
        "learnt": torch.nn.Parameter(torch.ones(2)),
        "module": module.state_dict(),
        "plain": [1, (2.5, "x"), {3, 4}, None],
    }
    copy = HostCopy().take(state)
    assert torch.equal(copy["whole"].view(3, 4)[1:], copy["rows"]) and copy["turned"].stride() == (1, 4)
    assert copy["rows"].untyped_storage().data_ptr() == copy["whole"].untyped_storage().data_ptr()
    assert type(copy["module"]) is OrderedDict and copy["module"]._metadata == state["module"]._metadata
    assert type(copy["learnt"]) is torch.Tensor and copy["plain"] == state["plain"]
    for name in ("half", "complex", "empty", "scalar"):
        assert torch.equal(copy[name], state[name]) and copy[name].dtype == state[name].dtype
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    base.zero_()
    state["plain"].append(5)
    assert copy["rows"].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]] and len(copy["plain"]) == 4


def test_the_memory_of_a_copy_is_kept_for_the_next() -> None:
    holder = HostCopy()
    tensors = [torch.full((3 << 20,), float(number)) for number in range(3)]
    first = [copy.data_ptr() for copy in holder.take(tensors)]
    tensors[1] += 10
    second = holder.take([torch.ones(5), *tensors])
    assert {copy.data_ptr() for copy in second[1:]} == set(first)
    assert [copy.unique().tolist() for copy in second[1:]] == [[0], [11], [2]]


def test_a_save_is_of_the_state_that_it_began_with(tmp_path: Path) -> None:
    told: list[Saved] = []
    saves = saving(tmp_path, on_saved=told.append, expected_bytes=100 * 10**6)
    assert saves.seconds_needed() == 3.0
    weight = torch.zeros(1 << 20)
    for step in range(1, 4):
        weight.fill_(step)
        assert saves.begin(step, {"weight": weight}, {"position": step}) < 30
        weight.fill_(-1)
    saves.finish()
    assert [saved.step for saved in told] == [1, 2, 3] and not saves.under_way
    for saved in told:
        model, trainer = read(saves.path(saved.step))
        assert damage(saves.path(saved.step)) is None
        assert model["weight"].unique().tolist() == [saved.step] and trainer == {"position": saved.step}
        assert saved.bytes == sum(file.stat().st_size for file in saves.path(saved.step).iterdir())
        assert 0 < saved.stall_s < saved.seconds
    assert saves.seconds_needed() == told[-1].seconds


def test_one_save_at_a_time_and_the_next_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, may_sync, sync = saving(tmp_path, expected_bytes=10**10), threading.Event(), os.fsync
    assert saves.seconds_needed() == 201.0
    monkeypatch.setattr(os, "fsync", lambda descriptor: (may_sync.wait(30), sync(descriptor))[1])
    saves.begin(1, {"weight": torch.ones(3)}, {})
    assert saves.under_way and not saves.path(1).exists()
    assert 300.0 < saves.seconds_needed() < 402.0  # its own rest, and then another one
    threading.Timer(0.3, may_sync.set).start()
    assert saves.begin(2, {"weight": torch.ones(3)}, {}) > 0.1
    assert saves.path(1).exists()
    saves.finish()
    assert damage(saves.path(2)) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_write_that_fails_is_told_with_path_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    saves = saving(tmp_path)
    saves.begin(5, {"weight": torch.ones(1 << 20)}, {})
    saves.finish()
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(os, call, fail)
        saves.begin(6, {"weight": torch.ones(1 << 20)}, {})
        with pytest.raises(CheckpointError) as caught:
            saves.finish()
    assert f"cannot write the checkpoint {saves.path(6)}: {os.strerror(number)}" in str(caught.value)
    assert os.listdir(tmp_path / "checkpoints") == ["step-5"] and damage(saves.path(5)) is None
    saves.check()  # it is told once


def test_a_folder_that_vanished_is_told(tmp_path: Path) -> None:
    saves = saving(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    saves.begin(1, {"weight": torch.ones(3)}, {})
    with pytest.raises(CheckpointError, match="No such file or directory"):
        saves.finish()


def test_multiples_of_keep_every_are_never_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, keep_every=4)
    checkpoints.prepare()
    for step in range(1, 12):
        checkpoints.write(step, {"weight": torch.ones(3)}, {})
    assert checkpoints.steps() == [4, 8, 10, 11]


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    """As `sbin/bench recover` does it 1,600 times, the manifest's own bytes included."""
    checkpoints, chance = Checkpoints(tmp_path / "checkpoints"), random.Random(7)
    files = (checkpoint.MODEL, checkpoint.TRAINER, checkpoint.CONFIG, checkpoint.MANIFEST)
    checkpoints.prepare()
    for step in (1, 2):
        weight = torch.randn(500, generator=torch.Generator().manual_seed(step))
        checkpoints.write(step, {"weight": weight}, {"position": step}, f"step: {step}\n")
    whole = tmp_path / "whole"
    shutil.copytree(checkpoints.path(2), whole)
    for _ in range(300):
        shutil.rmtree(checkpoints.path(2))
        shutil.copytree(whole, checkpoints.path(2))
        assert damage(checkpoints.path(2)) is None
        done = harm(checkpoints.path(2), checkpoints.path(1), files, chance)
        assert damage(checkpoints.path(2)) is not None, done
    shutil.rmtree(checkpoints.path(2))
    shutil.copytree(checkpoints.path(1), checkpoints.path(2))
    assert damage(checkpoints.path(2)) == "manifest.json is that of step 1"


def test_a_checkpoint_of_the_format_before_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.prepare()
    path = checkpoints.write(3, {"weight": torch.ones(3)}, {"position": 3})
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["sha256"]
    (path / checkpoint.MANIFEST).write_text(json.dumps({**manifest, "format": 1}, indent=1) + "\n")
    assert checkpoints.newest() == path and checkpoint.configuration(path) == ""


def test_k16_a_rank_waits_until_it_sees_what_rank_zero_sees(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.prepare()
    path = checkpoints.write(3, {"weight": torch.ones(3)}, {})
    expected, hidden = checkpoint.sizes(path), tmp_path / "hidden"
    assert set(expected) == {checkpoint.MODEL, checkpoint.TRAINER, checkpoint.MANIFEST}
    os.rename(path, hidden)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"rank 0 has chosen .*step-3, but here model.pt cannot be found"):
        await_visible(path, expected, limit_s=0.2)
    assert time.monotonic() - began < 20
    threading.Timer(0.3, os.rename, (hidden, path)).start()
    await_visible(path, expected)
    os.truncate(path / checkpoint.TRAINER, 5)
    with pytest.raises(CheckpointError, match="trainer.pt has 5 bytes of"):
        await_visible(path, expected, limit_s=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_k19_a_full_checkpoint_folder_ends_the_run_with_the_old_one_intact(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    arguments = ("toy", RUN, "train.save_every_steps=5", "train.epochs=200", "train.batch_size=8", "held_out=0")
    trial = ranks(tmp_path, *arguments, "trouble=disk", "trouble_at=sync", "trouble_step=8", ranks=number)
    assert all(code not in (0, 75) for code in trial.codes) and trial.codes[0] == 1, trial.text()
    assert "cannot write the checkpoint " in trial.logs[0] and "No space left on device" in trial.logs[0], trial.text()
    folder = tmp_path / "run/checkpoints"
    assert Checkpoints(folder).newest() == folder / "step-5" and os.listdir(folder) == ["step-5"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, "toy", RUN, "trouble=disk", "trouble_at=sync", "trouble_step=1", ranks=2)
    assert trial.codes == [1, 1] and "step 1/" not in trial.logs[0], trial.text()
    last = trial.logs[0].splitlines()[-1]
    assert "no checkpoint could be written to " in last and "No space left on device" in last
    assert trial.logs[1] == "" and os.listdir(tmp_path / "run/checkpoints") == []
    (tmp_path / "run/checkpoints").rmdir()
    (tmp_path / "run/checkpoints").write_text("")
    trial = ranks(tmp_path, "toy", RUN)
    assert trial.codes == [1] and "cannot use the checkpoint folder" in trial.logs[0].splitlines()[-1]
