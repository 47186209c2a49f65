"""The loop with real ranks: as one process would train, exactly resumed, each step and each sample once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_server import Ranks
from torch.nn import functional
from toy.config import Config
from toy.job import Job, Net, Numbers

from hpc.schema import TrainConfig
from hpc.train import checkpoint, metrics
from hpc.train.checkpoint import Checkpoints
from hpc.train.sampler import EpochSampler

RUN = "run_dir=run"
EVERY_STEP = "train.log_every_steps=1"


def lines(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [line for line in metrics.read(folder / "run/metrics.jsonl") if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]


def final_states(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    newest = Checkpoints(folder / "run/checkpoints").newest()
    assert newest is not None
    return checkpoint.read(newest)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return final_states(folder)[0]


def equal(one: Any, two: Any) -> bool:
    """Bit for bit, through containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


def made(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_same_losses_and_weights_with_1_2_and_4_ranks(ranks: Ranks, tmp_path: Path) -> None:
    # 41 samples in batches of 8: the last batch has one sample, so that three of four ranks have none.
    arguments = ("toy", RUN, EVERY_STEP, "samples=41", "train.batch_size=8", "train.epochs=2", "held_out=11")
    for number in (1, 2, 4):
        ranks(made(tmp_path, str(number)), *arguments, ranks=number).check()
    for number in (2, 4):
        assert losses(tmp_path / str(number)) == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
        weights = final_weights(tmp_path / str(number))
        for name, expected in final_weights(tmp_path / "1").items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-6)
        for one, other in zip(lines(tmp_path / "1", "eval"), lines(tmp_path / str(number), "eval"), strict=True):
            assert other["error"] == pytest.approx(one["error"], rel=1e-4)
    assert len(losses(tmp_path / "1")) == 12


@pytest.mark.slow
def test_d05_accumulation_on_two_ranks_is_one_big_batch(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", RUN, EVERY_STEP, "samples=44", "train.batch_size=16", "train.epochs=3")
    ranks(made(tmp_path, "big"), *arguments).check()
    ranks(made(tmp_path, "accumulated"), *arguments, "train.accumulate=2", ranks=2).check()
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "big"), rel=1e-4)
    for name, expected in final_weights(tmp_path / "big").items():
        torch.testing.assert_close(final_weights(tmp_path / "accumulated")[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_d06_one_process_trains_as_a_loop_by_hand(ranks: Ranks, tmp_path: Path, accumulate: int) -> None:
    # 10 samples, batches of 8 in 4 micro-batches: five micro-batches, two optimizer steps.
    trial = ranks(
        tmp_path, "toy", RUN, EVERY_STEP, "samples=10", "train.batch_size=8", f"train.accumulate={accumulate}"
    )
    trial.check()
    torch.manual_seed(0)
    job = Job(Config(), TrainConfig())
    from hpc.train import randomness

    randomness.seed_all(0)
    model = Net(Config())
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer, 2)
    data, order = Numbers(10), EpochSampler(10, batch_size=8).order().tolist()
    expected = []
    for batch in (order[:8], order[8:]):
        features, targets, _ = (torch.stack(column) for column in zip(*(data[i] for i in batch), strict=True))
        loss = functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        expected.append(loss.item())
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(final_weights(tmp_path)[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_k06_ten_steps_are_five_a_crash_and_five(ranks: Ranks, tmp_path: Path, number: int) -> None:
    # 5 steps per epoch would hide a wrong position: 7 of them, so the crash falls inside an epoch.
    arguments = ("toy", RUN, EVERY_STEP, "samples=53", "train.batch_size=8", "train.max_steps=10", "train.epochs=2")
    arguments += ("dropout=0.4", "optimizer=adamw", "train.save_every_steps=5")
    straight, resumed = made(tmp_path, "straight"), made(tmp_path, "resumed")
    ranks(straight, *arguments, ranks=number).check()
    crash = ranks(resumed, *arguments, "trouble=exit", "trouble_step=9", ranks=number)
    assert crash.codes[0] == 41
    assert Checkpoints(resumed / "run/checkpoints").steps() == [5]
    again = ranks(resumed, *arguments, ranks=number).check()
    assert "resuming at step 5 of 10" in again.logs[0]
    for one, two in zip(final_states(straight), final_states(resumed), strict=True):
        assert equal(one, two)
    assert losses(straight) == losses(resumed)
    without_time = [{k: v for k, v in line.items() if k not in ("time", "samples_per_s")} for line in lines(straight)]
    assert [
        {k: v for k, v in line.items() if k not in ("time", "samples_per_s")} for line in lines(resumed)
    ] == without_time


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_exactness_with_random_augmentation(ranks: Ranks, tmp_path: Path, workers: int) -> None:
    arguments = ("toy", RUN, EVERY_STEP, "samples=53", "train.batch_size=8", "train.epochs=2", "noise=0.5")
    arguments += ("train.save_every_steps=5", f"train.loader_workers={workers}", "dropout=0.2")
    straight, resumed = made(tmp_path, "straight"), made(tmp_path, "resumed")
    ranks(straight, *arguments).check()
    assert ranks(resumed, *arguments, "trouble=exit", "trouble_step=12").codes == [41]
    ranks(resumed, *arguments).check()
    assert losses(straight) == losses(resumed)
    assert equal(final_weights(straight), final_weights(resumed))


@pytest.mark.slow
def test_k20_a_crash_at_the_edge_of_an_epoch_neither_adds_nor_drops_steps(ranks: Ranks, tmp_path: Path) -> None:
    arguments = (
        "toy",
        RUN,
        EVERY_STEP,
        "samples=40",
        "train.batch_size=8",
        "train.epochs=3",
        "train.save_every_steps=5",
    )
    assert ranks(tmp_path, *arguments, "trouble=exit", "trouble_step=11").codes == [41]
    ranks(tmp_path, *arguments).check()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 16))
    assert [(line["step"], line["epoch"]) for line in lines(tmp_path, "eval")] == [(5, 0), (10, 1), (15, 2)]


@pytest.mark.slow
def test_f13_each_step_once_in_the_metrics_after_a_restart(ranks: Ranks, tmp_path: Path) -> None:
    arguments = (
        "toy",
        RUN,
        EVERY_STEP,
        "samples=40",
        "train.batch_size=4",
        "train.epochs=2",
        "train.save_every_steps=10",
    )
    assert ranks(tmp_path, *arguments, "trouble=exit", "trouble_step=13").codes == [41]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))
    ranks(tmp_path, *arguments).check()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


@pytest.mark.slow
def test_f13_lines_of_the_metrics_that_make_no_sense_are_left_out(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", RUN, EVERY_STEP, "samples=16", "train.batch_size=4", "train.max_steps=2")
    ranks(tmp_path, *arguments).check()
    with open(tmp_path / "run/metrics.jsonl", "ab") as stream:
        stream.write(b'\xff\xfe\n[1]\n{}\n{"step": "x"}\n{"step": null, "kind": "train"}\n{"kind": "train", "st')
    ranks(tmp_path, *arguments[:-1]).check()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_other_number_of_ranks_repeats_and_leaves_out_nothing(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", RUN, "samples=48", "train.batch_size=8", "train.save_every_steps=2", "train.epochs=1")
    before, after = made(tmp_path, "before"), made(tmp_path, "after")
    # step 3 is lost with the crash: both attempts see its samples, and the weights only once
    crash = ranks(tmp_path, *arguments, f"folder={before}", "trouble=exit", "trouble_step=3", ranks=2)
    assert 41 in crash.codes
    ranks(tmp_path, *arguments, f"folder={after}", ranks=4).check()
    resumed = seen(after)
    order = EpochSampler(48, batch_size=8).order().tolist()
    assert resumed == Counter(order[16:])


@pytest.mark.slow
def test_k17_a_finished_run_says_so_and_trains_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks(tmp_path, "toy", RUN).check()
    assert first.logs[0].splitlines()[-1].startswith("done: 1 step, ")
    again = ranks(tmp_path, "toy", RUN).check()
    assert again.logs[0].splitlines()[-1].startswith("already finished: 1 step, mean_id 4.5, error ")
    assert "step 1/1" not in again.logs[0]
    assert len(lines(tmp_path)) == 1 and len(lines(tmp_path, "eval")) == 1
    more = ranks(tmp_path, "toy", RUN, "train.epochs=3").check()
    assert "resuming at step 1 of 3" in more.logs[0]


@pytest.mark.slow
def test_evaluation_lost_with_a_crash_is_made_up_for(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", RUN).check()
    file = tmp_path / "run/metrics.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"eval"' not in line))
    again = ranks(tmp_path, "toy", RUN).check()
    assert "already finished: 1 step, mean_id 4.5" in again.logs[0]
    assert len(lines(tmp_path, "eval")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "word"), [("samples=41", "number of samples"), ("train.seed=1", "train.seed")])
def test_a_checkpoint_of_other_data_is_refused(ranks: Ranks, tmp_path: Path, setting: str, word: str) -> None:
    ranks(tmp_path, "toy", RUN).check()
    refused = ranks(tmp_path, "toy", RUN, setting)
    assert refused.codes == [2] and word in refused.logs[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_d01_each_held_out_sample_counts_once(ranks: Ranks, tmp_path: Path, number: int) -> None:
    ranks(tmp_path, "toy", RUN, "held_out=10", "samples=12", "train.batch_size=6", ranks=number).check()
    assert [(line["mean_id"], line["samples"]) for line in lines(tmp_path, "eval")] == [(4.5, 10)] * 1


@pytest.mark.slow
def test_d12_evaluation_of_a_model_with_batchnorm_cannot_wait_for_a_rank(ranks: Ranks, tmp_path: Path) -> None:
    # one held-out sample: the second rank evaluates nothing at all
    arguments = ("toy", RUN, "batchnorm=true", "held_out=1", "samples=32", "train.batch_size=16", "train.epochs=3")
    ranks(tmp_path, *arguments, ranks=2).check()
    assert [line["mean_id"] for line in lines(tmp_path, "eval")] == [0, 0, 0]


@pytest.mark.slow
def test_d15_two_nodes_of_two_ranks_share_the_data(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", RUN, "samples=32", "train.batch_size=8", f"folder={tmp_path}", ranks=4, nodes=2).check()
    assert seen(tmp_path) == Counter(range(32))


@pytest.mark.slow
def test_d08_clipping_comes_after_unscaling(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", RUN, "train.clip_grad_norm=0.05", "train.max_steps=3", "train.epochs=3", "train.accumulate=2")
    full, half = made(tmp_path, "fp32"), made(tmp_path, "fp16")
    ranks(full, *arguments).check()
    ranks(half, *arguments, "train.precision=fp16").check()
    assert final_states(half)[1]["scaler"]["scale"] == 65536
    for name, expected in final_weights(full).items():
        torch.testing.assert_close(final_weights(half)[name], expected, rtol=2e-2, atol=2e-3)
    free = made(tmp_path, "free")
    ranks(free, "toy", RUN, "train.max_steps=3", "train.epochs=3", "train.accumulate=2").check()
    gap = (final_weights(free)["first.weight"] - final_weights(full)["first.weight"]).abs().max()
    assert gap > 5e-3  # so the limit did bind, and equality above means something


@pytest.mark.slow
def test_bf16_trains(ranks: Ranks, tmp_path: Path) -> None:
    ranks(tmp_path, "toy", RUN, EVERY_STEP, "train.precision=bf16", "train.epochs=8", "train.batch_size=8").check()
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "number", "words"),
    [
        (("train.batch_size=3",), 4, ("train.batch_size=3", "4 ranks", "at least 4")),
        (("train.batch_size=50", "train.drop_last=true"), 1, ("all 40 samples",)),
        (("train.strategy=dp",), 2, ("train.strategy=dp", "train.strategy=ddp")),
        (("samples=0",), 1, ("no samples",)),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    ranks: Ranks, tmp_path: Path, arguments: tuple[str, ...], number: int, words: tuple[str, ...]
) -> None:
    trial = ranks(tmp_path, "toy", RUN, *arguments, ranks=number)
    assert trial.codes == [2] * number
    last = trial.logs[0].splitlines()[-1]
    assert last.startswith("hpc.train: error: ") and all(word in last for word in words), trial.text()


def seen(folder: Path) -> Counter[int]:
    """The ids of all samples that the ranks trained on."""
    ids: Counter[int] = Counter()
    for file in folder.glob("ids-*.jsonl"):
        for line in file.read_text().splitlines():
            ids.update(json.loads(line))
    return ids
