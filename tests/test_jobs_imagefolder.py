"""jobs.imagefolder: the network, the images, the index, the schedule, and a real run of two ranks on made-up images."""

import json
import os
import pickle
import random
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from hpc import config
from hpc.errors import ConfigError
from hpc.schema import TrainConfig
from jobs.imagefolder import index
from jobs.imagefolder.config import Config, DataConfig, ModelConfig, OptimConfig
from jobs.imagefolder.images import Images, UnreadableImage, middle_square, random_crop, read_image, to_tensor
from jobs.imagefolder.index import list_images, read_splits, write_index
from jobs.imagefolder.job import DEVIATION, MEAN, Job, rate_factor
from jobs.imagefolder.model import BasicBlock, Bottleneck, ResNet

REPOSITORY = Path(__file__).resolve().parent.parent
COLOURS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}


def make_folder(root: Path, *, train: int, val: int, size: tuple[int, int] = (40, 36)) -> Path:
    """One colour per class, each image of its own brightness and with noise; JPEG and PNG in turn."""
    draw = random.Random(0)
    for split, count in (("train", train), ("val", val)):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                shade = draw.uniform(0.5, 1.2)
                noise = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
                flat = Image.new("RGB", size, tuple(min(255, int(part * shade)) for part in colour))
                image = Image.blend(flat, noise, 0.3)
                image.save(folder / f"{number}.{'jpg' if number % 2 else 'PNG'}")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "with blank é", train=4, val=2)


def job_for(root: Path, **model: object) -> Job:
    settings = {"depth": 18, "width": 8, "stem": "small"} | model
    return Job(
        Config(model=ModelConfig(**settings), data=DataConfig(root=str(root), size=32, eval_resize=36)),
        TrainConfig(epochs=2),
    )


# --- network


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (50, 25_557_032)])
def test_the_published_number_of_parameters(depth, count):
    with torch.device("meta"):
        model = ResNet(ModelConfig(depth=depth), classes=1000)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("depth", "stem", "last"), [(18, "small", 64), (50, "imagenet", 256)])
def test_shapes_of_each_stage(depth, stem, last):
    model = ResNet(ModelConfig(depth=depth, width=8, stem=stem), classes=7).eval()
    x = model.stem(torch.randn(2, 3, 64, 64))
    assert x.shape == (2, 8, 64 if stem == "small" else 16, 64 if stem == "small" else 16)
    sides = []
    for stage in model.stages:
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == ([64, 32, 16, 8] if stem == "small" else [16, 8, 4, 2])
    assert x.shape[1] == last
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_the_stride_of_a_bottleneck_is_in_its_3x3_convolution():
    block = Bottleneck(16, 8, 2)
    assert block.conv1.stride == (1, 1) and block.conv2.stride == (2, 2) and block.conv2.kernel_size == (3, 3)


def test_each_block_starts_as_the_identity():
    torch.manual_seed(0)
    model = ResNet(ModelConfig(depth=50, width=8), classes=10)
    blocks = [module for module in model.modules() if isinstance(module, (BasicBlock, Bottleneck))]
    assert len(blocks) == 16 and all(not block.last_norm.weight.any() for block in blocks)
    plain = blocks[1]  # no stride, no change of width
    x = torch.rand(2, 32, 8, 8)
    assert torch.equal(plain(x), x)


def test_batchnorm_and_biases_do_not_decay(folder):
    job = job_for(folder)
    model = job.model()
    decayed, level = job.optimizer(model).param_groups
    assert decayed["weight_decay"] == 1e-4 and level["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") and p.dim() >= 2 for p in decayed["params"])
    assert len(decayed["params"]) + len(level["params"]) == len(names)
    assert "classify.bias" in {names[id(p)] for p in level["params"]}


# --- images


def test_samples_are_bytes_and_normalised_on_the_way_into_the_model(folder):
    job = job_for(folder)
    pixels, label = job.train_data()[0]
    assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.uint8 and label == 0
    grey = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    expected = (0.2 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    torch.testing.assert_close(job._normalised(grey)[0, :, 0, 0], expected)


def test_channels_last_changes_the_layout_and_not_the_result(folder):
    torch.manual_seed(0)
    plain, last = job_for(folder), job_for(folder, channels_last=True)
    model = plain.model()
    twin = last.model()
    twin.load_state_dict(model.state_dict())
    batch = torch.utils.data.default_collate([plain.eval_data()[i] for i in range(4)])
    assert last._normalised(batch[0]).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain.loss(model, batch), last.loss(twin, batch), rtol=1e-4, atol=1e-5)


def test_augmentation_follows_from_torchs_seed_and_evaluation_has_none(folder):
    train, held_out = job_for(folder).train_data(), job_for(folder).eval_data()

    def seen(data: Images, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return data[1][0]

    assert torch.equal(seen(train, 1), seen(train, 1))
    assert not torch.equal(seen(train, 1), seen(train, 2))
    assert torch.equal(seen(held_out, 1), seen(held_out, 2))


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (1000, 20), (20, 1000), (3, 3), (1, 1)])
def test_random_crops_stay_inside_and_keep_their_bounds(size):
    choice = random.Random(0)
    for _ in range(300):
        left, upper, right, lower = random_crop(size, choice, min_area=0.08)
        assert 0 <= left < right <= size[0] and 0 <= upper < lower <= size[1]
        if min(size) > 300:
            assert 0.079 < (right - left) * (lower - upper) / (size[0] * size[1]) <= 1
            assert 0.74 < (right - left) / (lower - upper) < 1.35


def test_the_middle_is_cut_out_and_mirrored():
    image = Image.new("RGB", (80, 40))
    image.paste((255, 0, 0), (20, 0, 40, 40))  # the left half of the middle square
    box = middle_square((80, 40), 1.0)
    assert box == (20, 0, 60, 40) and middle_square((80, 40), 0.5) == (30, 10, 50, 30)
    straight = to_tensor(image, box, 8, mirrored=False)
    assert straight[0, :, 1:3].min() == 255 and straight[0, :, 5:].max() == 0 and not straight[1:].any()
    assert torch.equal(to_tensor(image, box, 8, mirrored=True), straight.flip(2))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_image_becomes_three_channels(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("RGB", (9, 7), (200, 200, 200)).convert(mode).save(path)
    assert read_image(path).mode == "RGB"


def test_an_unreadable_image_is_named_in_one_line(folder):
    broken = folder / "train/red/0.PNG"
    for content in (b"", b"no image", broken.read_bytes()[:60]):
        broken.write_bytes(content)
        with pytest.raises(UnreadableImage, match=r"red/0\.PNG") as caught:
            read_image(broken)
        assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    broken.unlink()
    with pytest.raises(UnreadableImage, match="No such file"):
        read_image(broken)


def test_a_data_loader_process_passes_the_one_line_on(folder):
    data = job_for(folder).eval_data()
    (folder / "val/blue/1.jpg").write_bytes(b"no image")
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
    with pytest.raises(UnreadableImage) as caught:
        list(loader)
    assert str(caught.value).startswith("cannot read the image ") and "\n" not in str(caught.value)


# --- listing and index


def test_classes_are_sorted_and_each_image_is_there_once(folder):
    splits = read_splits(folder, None)
    train = splits["train"]
    assert train.classes == splits["val"].classes == ("blue", "green", "red")
    assert (len(train), len(splits["val"])) == (12, 6)
    paths = [train.path(i) for i in range(len(train))]
    assert sorted(paths) == sorted(path for path in (folder / "train").rglob("*.*"))
    assert [path.parent.name for path in paths] == [train.classes[label] for label in train.labels]
    (folder / "train/red/notes.txt").write_text("no image")
    assert len(read_splits(folder, None)["train"]) == 12


@pytest.mark.slow
def test_the_index_says_what_the_listing_says_and_is_the_only_file_read(folder, monkeypatch, capsys):
    (folder / "train/red/ü b.jpg").write_bytes((folder / "train/red/1.jpg").read_bytes())
    (folder / "train/red" / os.fsdecode(b"\xff.jpg")).write_bytes((folder / "train/red/1.jpg").read_bytes())
    listed = read_splits(folder, None)
    assert index.main([str(folder)]) == 0
    told = capsys.readouterr().out
    assert "20 images, 14 to train on and 6 held out, in 3 classes" in told
    assert f"data.root={folder}" in shlex.split(told) and f"data.index={folder / 'index.txt'}" in shlex.split(told)
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("the folder was listed"))
    assert read_splits(folder, folder / "index.txt") == listed


def test_an_index_is_replaced_whole_and_leaves_nothing_beside(folder):
    target = folder / "index.txt"
    target.write_text("old")
    assert write_index(folder, target) == 18
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["index.txt"]
    assert target.read_text().splitlines() == list_images(folder)
    assert stat.S_IMODE(target.stat().st_mode) & 0o400


def test_splits_survive_the_way_into_another_process(folder):
    train = read_splits(folder, None)["train"]
    assert pickle.loads(pickle.dumps(train)) == train


def test_the_index_command_needs_no_torch(folder):
    code = "import sys; from jobs.imagefolder.index import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def remove_val(root: Path) -> None:
    (root / "val").rename(root / "elsewhere")


def empty_train(root: Path) -> None:
    for path in (root / "train").rglob("*.*"):
        path.unlink()


def empty_val(root: Path) -> None:
    for path in (root / "val").rglob("*.*"):
        path.unlink()


def rename_class(root: Path) -> None:
    (root / "val/red").rename(root / "val/violet")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_val, r"val: No such file.*data\.root must hold"),
        (empty_train, r"no image in train/<class>/"),
        (empty_val, r"no image in val/<class>/"),
        (rename_class, r"no train/violet/"),
    ],
)
def test_a_folder_of_another_form_is_told_in_one_line(folder, spoil, message):
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        read_splits(folder, None)
    assert "\n" not in str(caught.value)


def test_missing_root_and_bad_index_are_told(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.root='.*nowhere' is not a folder"):
        read_splits(tmp_path / "nowhere", None)
    with pytest.raises(ConfigError, match=r"data\.index=.*No such file.*jobs\.imagefolder\.index"):
        read_splits(folder, folder / "none.txt")
    for line in ("train/loose.jpg", "test/red/1.jpg", "train/../../etc/1.jpg"):
        (folder / "index.txt").write_text(f"train/red/1.jpg\n{line}\n")
        with pytest.raises(ConfigError, match="line 2"):
            read_splits(folder, folder / "index.txt")
    assert index.main([str(tmp_path / "nowhere")]) == 2


# --- loss, measures, schedule, configuration


def test_top1_and_top5_are_counted(folder):
    job = job_for(folder)
    logits = torch.tensor([[9.0, 1, 2, 3, 4, 5], [0, 9, 8, 7, 6, 5], [0, 9, 8, 7, 6, 5]])
    batch = (torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 5, 0]))
    result = job.evaluate(lambda images: logits, batch)
    assert {name: (int(hits), count) for name, (hits, count) in result.items()} == {
        "accuracy": (1, 3),
        "top5_accuracy": (2, 3),
    }


def test_fewer_than_five_classes_have_a_top5_too(folder):
    job = job_for(folder)
    batch = torch.utils.data.default_collate([job.eval_data()[i] for i in range(6)])
    hits, count = job.evaluate(job.model().eval(), batch)["top5_accuracy"]
    assert int(hits) == count == 6


def test_warm_up_then_cosine_to_nothing():
    optim = OptimConfig(warmup_epochs=1)
    rates = [rate_factor(step, 100, 10, optim) for step in range(101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and rates[99] > 0 and rates[100] == pytest.approx(0)


def test_warm_up_then_a_tenth_after_each_step():
    optim = OptimConfig(warmup_epochs=5, schedule="step", step_epochs=[30, 60, 80])
    per_epoch = [rate_factor(epoch * 7, 630, 90, optim) for epoch in range(90)]
    assert per_epoch[5:30] == [1.0] * 25
    assert per_epoch[30:60] == pytest.approx([0.1] * 30)
    assert per_epoch[60:80] == pytest.approx([0.01] * 20) and per_epoch[89] == pytest.approx(0.001)
    assert per_epoch[0] == pytest.approx(1 / 35)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_a_run_shorter_than_the_warm_up_still_trains(total):
    assert all(0 < rate_factor(step, total, 1, OptimConfig()) <= 1 for step in range(total))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"data\.root is not set"),
        (["data.root=x", "model.depth=51"], "give one of 18, 34, 50, 101, 152"),
        (["data.root=x", "data.size=300"], r"data\.eval_resize=256 .*is less than data\.size=300"),
        (["data.root=x", "optim.schedule=linear"], "cosine or step"),
        (["data.root=x", "model.stem=tiny"], "imagenet or small"),
        (["data.root=x", "optim.label_smoothing=1"], "label_smoothing"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.load(job="jobs.imagefolder", overrides=overrides, site=False)


# --- the whole


def train_on(folder: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks under torchrun."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "hpc.train"]
        + ["jobs.imagefolder", f"data.root={folder}", f"run_dir={run_dir}", "data.size=32", "data.eval_resize=36"]
        + ["model.depth=18", "model.width=8", "model.stem=small", "optim.warmup_epochs=1", *more],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_learn_to_tell_colours_apart(tmp_path):
    folder = make_folder(tmp_path / "images", train=32, val=11)
    write_index(folder, folder / "index.txt")
    run = train_on(
        folder, tmp_path / "run", f"data.index={folder / 'index.txt'}", "train.epochs=4", "train.batch_size=16"
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert last["accuracy"] >= 0.9 and last["top5_accuracy"] == 1.0
    assert last["samples"] == 33


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_damaged_image_ends_a_run_with_its_name(tmp_path):
    folder = make_folder(tmp_path / "images", train=4, val=1)
    (folder / "train/green/2.PNG").write_bytes(b"no image")
    run = train_on(folder, tmp_path / "run", "train.epochs=1", "train.batch_size=12", "train.loader_workers=1")
    assert run.returncode != 0
    told = [line for line in run.stderr.splitlines() if line.startswith("hpc.train: error: cannot read the image")]
    assert len(told) >= 1 and "train/green/2.PNG" in told[0]
