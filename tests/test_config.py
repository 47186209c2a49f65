from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refusal, yaml_file

from hpc import config
from hpc.config import load, load_text
from hpc.errors import ConfigError
from hpc.schema import Config

ROOT = Path(__file__).resolve().parent.parent
WriteJob = Callable[..., str]
pytestmark = pytest.mark.usefixtures("nobody_elses_settings")


def test_later_wins(write_job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["epochs", "max_steps", "batch_size", "save_every_steps", "log_every_steps", "keep_checkpoints"]

    def layer(value: int, number: int) -> str:
        return "train:\n" + "".join(f"  {key}: {value}\n" for key in keys[number:])

    job = write_job(base=layer(20, 2))
    monkeypatch.setenv("HPC_SITE_CONFIG", str(yaml_file(layer(10, 1), "site.yaml")))
    train = load(
        job=job,
        files=[yaml_file(layer(30, 3), "one.yaml"), yaml_file(layer(40, 4), "two.yaml")],
        flags={"train.keep_checkpoints": 50, "train.log_every_steps": None},
        overrides=["train.keep_checkpoints=59", "train.keep_checkpoints=60"],
    ).config.train
    assert [getattr(train, key) for key in keys] == [Config().train.epochs, 10, 20, 30, 40, 60]
    assert load(job=job, site=False).config.train.max_steps is None


def test_flags_give_way_to_key_value() -> None:
    assert load(flags={"slurm.nodes": "2"}, overrides=["slurm.nodes=3"]).config.slurm.nodes == 3


def test_the_sites_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HPC_SITE_CONFIG", str(tmp_path / "gone.yaml"))
    assert "HPC_SITE_CONFIG" in refusal() and "gone.yaml" in refusal()
    assert load(site=False).config.slurm.partition is None
    monkeypatch.delenv("HPC_SITE_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "hpc"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text("slurm: {partition: gpu}")
    assert load().config.slurm.partition == "gpu"
    (folder / "site.yaml").write_text("slurm: {partitions: gpu}")
    assert "site.yaml, line 1" in refusal()


def test_one_of_memory_and_cores_takes_the_others_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_SITE_CONFIG", str(yaml_file("slurm: {mem: 10G, cpus_per_gpu: 4}", "site.yaml")))
    slurm = load(overrides=["slurm.mem_per_gpu=64G", "slurm.cpus_per_task=2"]).config.slurm
    assert (slurm.mem, slurm.mem_per_gpu, slurm.mem_per_cpu) == (None, "64G", None)
    assert (slurm.cpus_per_gpu, slurm.cpus_per_task) == (None, 2)
    message = refusal(overrides=["slurm.mem_per_gpu=64G", "slurm.mem=1G"])
    assert "slurm.mem=1G" in message and "slurm.mem_per_gpu=64G" in message
    assert "needs one of them" in refusal(flags={"slurm.cpus_per_gpu": 2, "slurm.cpus_per_task": 2})


def test_the_job_decides_which_parameters_there_are(write_job: WriteJob) -> None:
    job = write_job(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\n", base="width: 4\n"
    )
    assert load(job=job).parameters.width == 4
    assert load(job=job, overrides=["width=5"]).parameters.width == 5
    assert load(files=[yaml_file(f"job: {job}\nwidth: 6")]).parameters.width == 6
    assert load(overrides=[f"job={job}"]).config.job == job
    assert "unknown key width" in refusal(overrides=["width=5"])


def test_a_job_that_does_not_exist(write_job: WriteJob) -> None:
    job = write_job()
    for wrong in ("jobs.digit", "digits", "jobs/digits", "jobs.digits."):
        message = refusal(job=wrong)
        assert wrong in message
        assert "did you mean jobs.digits?" in message
    assert job in config.job_names()
    assert "jobs.digits" in refusal(job="jobs.zzzzzzzz")
    assert "no training job ../x" in refusal(job="../x")
    assert "(a.yaml, line 2)" in refusal(files=[yaml_file("\njob: nosuch.job")])


def test_a_jobs_own_module_is_found_first_from_the_working_directory(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "net"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text("from dataclasses import dataclass\n@dataclass\nclass Config:\n    x: int = 1\n")
    code = "from hpc.config import load; print(load(job='mine.net', site=False).parameters.x)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}; {code}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from dataclasses import dataclass\n@dataclass\nclass Config:\n    train: int = 1\n", "own setting train"),
        ("from dataclasses import dataclass\n@dataclass\nclass Config:\n    name: str = ''\n", "own setting name"),
        ("class Config:\n    x = 1\n", "dataclass named Config"),
        ("x = 1\n", "dataclass named Config"),
        ("import nosuchmodule\n", "line 1"),
        ("1/0\n", "ZeroDivisionError"),
        ("def f(:\n", "SyntaxError"),
        ("from dataclasses import dataclass\n@dataclass\nclass Config:\n    f: complex = 1j\n", "complex"),
    ],
)
def test_a_jobs_config_that_cannot_be_used(source: str, part: str, write_job: WriteJob) -> None:
    job = write_job(source)
    message = refusal(job=job)
    assert part in message
    assert job.replace(".", "/") in message or job in message


def test_a_jobs_config_keeps_torch_out(write_job: WriteJob, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    job = write_job("import torch\nfrom dataclasses import dataclass\n@dataclass\nclass Config:\n    pass\n")
    code = f"from hpc.config import load; load(job={job!r}, site=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "imports torch; keep it in" in done.stderr


def test_a_parameter_without_a_default_must_be_given(write_job: WriteJob) -> None:
    job = write_job("from dataclasses import dataclass\n@dataclass\nclass Config:\n    folder: str\n")
    assert "give folder=VALUE" in refusal(job=job)
    assert load(job=job, overrides=["folder=x"]).parameters.folder == "x"


def test_a_jobs_own_check_is_made_here_and_told_with_the_place(write_job: WriteJob) -> None:
    job = write_job(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\n"
        "    def __post_init__(self):\n        if self.width % 3:\n            raise ValueError('width must be a multiple of 3')\n"
    )
    assert "multiple of 3" in refusal(job=job, overrides=["width=4"])
    assert "train.epochs=0 (a.yaml, line 2): " in refusal(files=[yaml_file("train:\n  epochs: 0")])


def test_frozen_and_nested_parameters(write_job: WriteJob) -> None:
    job = write_job(
        "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass In:\n    x: int = 1\n    y: int = 2\n"
        "@dataclass(frozen=True)\nclass Config:\n    a: In = In()\n    b: In | None = None\n"
        "    c: dict[str, In] = field(default_factory=dict)\n",
        base="a: {x: 5}\nb: {y: 6}\n",
    )
    loaded = load(job=job, overrides=["a.y=7", "c.k.x=8"])
    made = loaded.parameters
    assert (made.a.x, made.a.y, made.b.x, made.b.y, made.c["k"].x, made.c["k"].y) == (5, 7, 1, 6, 8, 2)
    assert load_text(loaded.to_yaml()) == loaded
    assert load(job=job, overrides=["b=null"]).parameters.b is None


def test_a_jobs_base_cannot_name_another_job(write_job: WriteJob) -> None:
    assert "base.yaml" in refusal(job=write_job(base="job: jobs.gpt"))


def test_a_command_has_no_parameters(write_job: WriteJob) -> None:
    arguments = ["train.py", "--lr", "3e-4", "", "a\nb", "???", "${x}", "-1", "null"]
    loaded = load(command=arguments, overrides=["slurm.nodes=2"])
    assert (loaded.config.command, loaded.parameters) == (arguments, None)
    assert load_text(loaded.to_yaml()) == loaded
    assert "unknown key optim.lr" in refusal(command=["x"], overrides=["optim.lr=1"])
    assert "both a job" in refusal(job="jobs.digits", command=["x"])
    assert "NUL" in refusal(command=["a\0b"])


def test_a_job_named_beside_a_written_command_runs_the_job(write_job: WriteJob) -> None:
    written = yaml_file(load(command=["x"]).to_yaml())
    job = write_job()
    assert load(files=[written]).config.command == ["x"]
    assert load(files=[written], job=job).config.command == []
    assert load(files=[yaml_file(load(job=job).to_yaml())], command=["y"]).parameters is None


def test_x07_utf8_whatever_the_locale(tmp_path: Path) -> None:
    yaml_file("name: dédé\nrun_root: añejo-实验\n")
    code = (
        "from pathlib import Path; from hpc.config import load\n"
        "made = load(files=[Path('a.yaml')], command=['x'], site=False)\n"
        "Path('b.yaml').write_bytes(made.to_yaml().encode())\n"
        "assert load(files=[Path('b.yaml')], site=False) == made\n"
        "assert made.config.name == 'd\\xe9d\\xe9'"
    )
    environment = {"PATH": os.environ["PATH"], "LANG": "C", "LC_ALL": "C", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert "dédé" in Path("b.yaml").read_text(encoding="utf-8")


HOSTILE = ["12:00:00", "no", "010", "${x}", "\\${x}", "'", '"', "it's", " leading", "trailing ", "- x", "#", "# x", "a: b", "[", "{}", "&a", "*a",
           "!t", "%", "@", "`", "|", ">", "", "~", "null", "1e3", "1_0", "0o7", "=", "<<", "\t", "\n", "a\nb\n", "\u2028", "\x85", "\ufeff",
           "é实验🙂", "\0", "\x1b[0m", "\ud800", "y", "0x1", ".inf", "2001-01-01", "---", "...", "? x", "$", "\\", "x" * 300]  # fmt: skip
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)).filter(
    lambda text: text != "???"
)  # OmegaConf's "must be given"
anything = st.recursive(
    st.one_of(texts, st.integers(-(10**25), 10**25), st.floats(allow_nan=False), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts, anything, st.lists(texts, max_size=3), st.dictionaries(texts, texts, max_size=3), st.floats(allow_nan=False)
)
def test_what_is_written_reads_back_equal(
    all_types: str, text: str, value: object, many: list[str], table: dict[str, str], rate: float
) -> None:
    from hpc import yamltext

    given_ = {
        "text": text,
        "maybe": text,
        "anything": value,
        "many": many,
        "table": table,
        "rate": rate,
        "bag": {"x": value},
    }
    written = yamltext.dump({"job": all_types, **given_})
    loaded = load_text(written)
    for key, expected in given_.items():
        assert getattr(loaded.parameters, key) == expected
    again = loaded.to_yaml()
    assert load_text(again) == loaded
    Path("w.yaml").write_bytes(again.encode())
    assert load(files=[Path("w.yaml")]) == loaded


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=20), st.lists(st.text(max_size=12), max_size=3))
def test_any_text_is_taken_or_refused_in_one_line(text: str, setup: list[str]) -> None:
    try:
        loaded = load(
            flags={"name": text, "slurm.partition": text, "slurm.extra": {"comment": text}, "slurm.setup": setup}
        )
    except ConfigError as error:
        assert error.exit_code == 2
    else:
        assert load_text(loaded.to_yaml()) == loaded
        assert all(line.replace("\t", "").isprintable() for line in loaded.config.slurm.setup)
        assert (loaded.config.name or "x").isprintable()


def test_written_yaml_means_the_same_to_pyyaml() -> None:
    import yaml

    loaded = load(overrides=["slurm.time=12:00:00", "name=no", "slurm.mem=010", "slurm.extra.comment=1e3"])
    read = yaml.safe_load(loaded.to_yaml())
    assert read["slurm"]["time"] == "12:00:00"
    assert read["name"] == "no"
    assert read["slurm"]["extra"]["comment"] == "1e3"
    assert read == config.plain(loaded.config) | config.plain(loaded.parameters)


def test_k13_the_whole_as_plain_data(all_types: str) -> None:
    import json

    loaded = load(job=all_types, overrides=["optim.lr=1e-3", "path=x", "colour=BLUE"])
    whole = config.plain(loaded.config) | config.plain(loaded.parameters)
    assert json.loads(json.dumps(whole)) == whole


def test_neither_torch_nor_submitit_is_imported(tmp_path: Path) -> None:
    code = "import sys; from hpc.config import load; load(site=False); print([m for m in ('torch', 'submitit') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
