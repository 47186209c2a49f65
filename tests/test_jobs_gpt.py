"""jobs.gpt: its text, its model, its schedule, and one real run that must reach the stated figure."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc import config
from hpc.errors import ConfigError
from hpc.schema import TrainConfig
from jobs.gpt.config import Config, DataConfig, ModelConfig, OptimConfig
from jobs.gpt.job import GOAL_BITS_PER_BYTE, Job, rate_factor
from jobs.gpt.model import Gpt, rotary_angles, rotate
from jobs.gpt.text import FILE_MARK, IGNORED, Windows, is_held_out, list_files, read_split

REPOSITORY = Path(__file__).resolve().parent.parent
SMALL = ModelConfig(layers=2, width=32, heads=2)


def gpt(model: ModelConfig = SMALL, **data: object) -> Job:
    return Job(Config(model=model, data=DataConfig(**data)), TrainConfig())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 files of 20 to 79 bytes, some in a folder below."""
    (tmp_path / "below").mkdir()
    for number in range(60):
        name = f"below/{number}.py" if number % 3 == 0 else f"{number}.py"
        (tmp_path / name).write_bytes(bytes([97 + number % 26]) * (20 + number))
    return tmp_path


# --- text


def test_the_standard_library_is_split_by_file_and_the_split_is_stable():
    data = DataConfig()
    train, held_out = read_split(data, held_out=False), read_split(data, held_out=True)
    assert len(train) > 4_000_000 and len(held_out) > 100_000
    share = len(held_out) / (len(held_out) + len(train))
    assert 0.02 < share < 0.10
    assert torch.equal(held_out, read_split(data, held_out=True))
    marks = bytes(train.tolist()[:200_000]).split(FILE_MARK)
    assert marks[0] == b"" and all(piece not in bytes(held_out.tolist()) for piece in marks[1:-1] if len(piece) > 500)


def test_the_split_of_a_file_is_the_same_on_every_machine():
    held_out = [name for name in map("{}.py".format, range(100)) if is_held_out(name, 0.05)]
    assert held_out == ["8.py", "27.py", "35.py", "43.py", "46.py", "60.py", "82.py"]
    held = [is_held_out(f"{number}.py", 0.05) for number in range(2000)]
    assert 60 < sum(held) < 140


def test_tests_and_what_may_be_missing_are_left_out():
    paths = list_files(Path(os.__file__).parent, ".py")
    assert "os.py" in paths and "json/decoder.py" in paths
    assert paths == sorted(paths)
    for part in ("test", "tests", "site-packages", "dist-packages", "idlelib", "encodings"):
        assert not [path for path in paths if part in path.split("/")]
    assert not [path for path in paths if path.startswith("_sysconfigdata")]


def test_both_sides_hold_every_file_whole_and_once(folder):
    data = DataConfig(context=16, folder=str(folder), held_out=0.3)
    pieces = []
    for held_out in (False, True):
        pieces += bytes(read_split(data, held_out=held_out).tolist()).split(FILE_MARK)[1:]
    assert sorted(pieces) == sorted(path.read_bytes() for path in folder.rglob("*.py"))


def test_a_limit_is_kept_to_the_byte_and_opens_few_files(folder):
    whole = read_split(DataConfig(context=16, folder=str(folder)), held_out=False)
    limited = read_split(DataConfig(context=16, folder=str(folder), max_bytes=150), held_out=False)
    files = bytes(limited.tolist()).count(FILE_MARK)
    assert len(limited) - files == 150 and len(whole) > 1000
    assert files <= 7  # files have at least 20 bytes


def test_links_are_not_followed(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret.py"
    outside.write_text("x")
    (folder / "link.py").symlink_to(outside)
    (folder / "linked").symlink_to(outside.parent)
    assert not [path for path in list_files(folder, ".py") if "link" in path]


@pytest.mark.parametrize("length", [1 + 4 * 16, 1 + 4 * 16 + 5, 1 + 4 * 16 - 1])
def test_every_held_out_byte_is_a_target_once(length):
    text = torch.arange(length, dtype=torch.uint8)
    windows = Windows(text, 16, pad=True)
    targets = torch.cat([windows[index][1] for index in range(len(windows))])
    assert targets[targets != IGNORED].tolist() == list(range(1, length))
    for index in range(len(windows)):
        inputs, following = windows[index]
        assert inputs.shape == following.shape == (16,)
        counted = following != IGNORED
        assert torch.equal(inputs[counted], following[counted] - 1)


def test_training_windows_are_all_full_and_outside_is_refused():
    windows = Windows(torch.arange(100, dtype=torch.uint8), 16, pad=False)
    assert len(windows) == 99 // 16
    assert all((target != IGNORED).all() for _, target in (windows[i] for i in range(len(windows))))
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_a_missing_folder_and_too_little_text_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*No such file.*data\.folder"):
        read_split(DataConfig(folder=str(tmp_path / "nowhere")), held_out=False)
    (tmp_path / "a.py").write_text("short")
    with pytest.raises(ConfigError, match=r"too few for data\.context=128"):
        read_split(DataConfig(folder=str(tmp_path), held_out=0.0), held_out=False)


# --- model


def test_shapes_and_parameter_count():
    model = Gpt(ModelConfig(layers=3, width=64, heads=4))
    assert model(torch.zeros(2, 10, dtype=torch.long)).shape == (2, 10, 256)
    count = sum(p.numel() for p in model.parameters())
    assert count == 256 * 64 + 3 * (12 * 64**2 + 2 * 64) + 64  # embedding (tied), blocks, last norm


def test_it_begins_by_knowing_nothing():
    torch.manual_seed(0)
    job = gpt()
    batch = tuple(torch.randint(256, (2, 4, 64)))
    assert job.loss(job.model(), batch).item() == pytest.approx(math.log(256), abs=0.1)


def test_no_byte_sees_those_after_it():
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    tokens = torch.randint(256, (1, 20))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    assert (before[:, 12:] - after[:, 12:]).abs().amax(-1).min() > 1e-4


def test_each_byte_sees_those_before_it_in_their_order():
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    tokens = torch.randint(256, (1, 20))
    swapped = tokens.clone()
    swapped[0, [3, 4]] = tokens[0, [4, 3]]
    assert (model(tokens)[0, -1] - model(swapped)[0, -1]).abs().max() > 1e-5


def test_rotation_depends_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 8)
    rotation = rotary_angles(32, 8, torch.device("cpu"))
    turned_query, turned_key = (rotate(x.expand(32, 8), rotation) for x in (query, key))
    scores = turned_query @ turned_key.T
    torch.testing.assert_close(scores[5, 2], scores[25, 22])
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm().expand(32))
    assert abs(scores[5, 2] - scores[6, 2]) > 1e-4


def test_only_matrices_decay_and_nothing_is_left_out():
    job = gpt()
    model = job.model()
    decayed, level = job.optimizer(model).param_groups
    assert decayed["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decayed["params"])
    assert level["weight_decay"] == 0.0 and all(p.dim() == 1 for p in level["params"])
    assert len(decayed["params"]) + len(level["params"]) == len(list(model.parameters()))


def test_evaluation_counts_bytes_and_not_padding():
    torch.manual_seed(0)
    job = gpt()
    model = job.model().eval().requires_grad_(False)
    tokens, targets = torch.randint(256, (2, 3, 8))
    targets[2, 5:] = IGNORED
    bits, count = job.evaluate(model, (tokens, targets))["bits_per_byte"]
    assert int(count) == 3 * 8 - 3
    assert float(bits) / int(count) == pytest.approx(job.loss(model, (tokens, targets)).item() / math.log(2), rel=1e-5)


# --- schedule


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine_to_the_floor():
    optim = OptimConfig(lr=1.0, warmup_steps=10, floor=0.1)
    rates = [rate_factor(step, 111, optim) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[10] == 1.0 and rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert rate_factor(500, 111, optim) == pytest.approx(0.1)


@pytest.mark.parametrize("total", [1, 2, 3, 5])
def test_a_short_run_has_a_rate_in_every_step(total):
    assert all(0 < rate_factor(step, total, OptimConfig(warmup_steps=100)) <= 1 for step in range(total + 1))


# --- configuration


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=3", "make model.width a multiple of 6"),
        ("data.context=0", "data.context=0"),
        ("data.held_out=1.0", "data.held_out=1.0"),
        ("optim.lr=0", "optim.lr=0"),
        ("optim.floor=2", "optim.floor=2"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_without_torch(override, message):
    with pytest.raises(ConfigError, match=message):
        config.load(job="jobs.gpt", overrides=[override], site=False)


def test_the_overrides_for_a_real_gpu_are_accepted():
    text = (REPOSITORY / "jobs/gpt/base.yaml").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    overrides = [word for word in comment.split() if "=" in word]
    assert len(overrides) > 8
    loaded = config.load(job="jobs.gpt", overrides=overrides, site=False)
    assert loaded.parameters.model.layers == 12 and loaded.parameters.data.max_bytes is None
    assert loaded.config.train.precision == "bf16"


# --- the whole


@pytest.mark.slow
@pytest.mark.timeout(1500)  # about a minute on two free cores
def test_it_reaches_the_stated_figure(tmp_path):
    """The run of base.yaml as it is: below GOAL_BITS_PER_BYTE on held-out files."""
    run = subprocess.run(
        [sys.executable, "-m", "hpc.train", "jobs.gpt", f"run_dir={tmp_path / 'run'}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    figures = [line["bits_per_byte"] for line in lines if "bits_per_byte" in line]
    assert 1.0 < figures[-1] < GOAL_BITS_PER_BYTE
