from __future__ import annotations

import pytest
from refusals import refusal, yaml_file

from hpc import fields, rules
from hpc.config import load, load_text
from hpc.schema import Config

pytestmark = pytest.mark.usefixtures("nobody_elses_settings")


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "4x", ""])
@pytest.mark.parametrize("key", ["slurm.nodes", "slurm.gpus_per_node"])
@pytest.mark.parametrize("by", ["flag", "override"])
def test_s21_counts_that_cannot_be_meant(key: str, value: str, by: str) -> None:
    if key == "slurm.gpus_per_node" and value == "":
        assert load(overrides=[f"{key}="]).config.slurm.gpus_per_node is None
        return
    message = refusal(flags={key: value}) if by == "flag" else refusal(overrides=[f"{key}={value}"])
    assert message.startswith(f"{key}=") and "(command line): needs " in message


def test_s21_zero_gpus_says_what_to_do() -> None:
    assert "--workers-per-node" in refusal(flags={"slurm.gpus_per_node": 0})
    assert (
        load(
            flags={"launch.workers_per_node": 4}, overrides=["slurm.gpus_per_node=null"]
        ).config.launch.workers_per_node
        == 4
    )


TEXTS = ["name", "slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "slurm.exclude", "slurm.nodelist",
         "slurm.reservation", "slurm.mem", "slurm.time", "slurm.signal", "slurm.gpus_per_node", "run_root", "run_dir",
         "launch.python", "slurm.extra.comment"]  # fmt: skip


@pytest.mark.parametrize("bad", ["\n", "\r", "\0", "\u2028", "\u2029", "\x1b", "\x85", "\u202e"])
def test_no_control_character_reaches_slurm(bad: str) -> None:
    assert "name=" in refusal(flags={"name": f"x{bad}#SBATCH --wrap=id"})
    assert "slurm.setup=" in refusal(flags={"slurm.setup": [f"x{bad}y"]})


@pytest.mark.parametrize("key", TEXTS)
def test_no_newline_reaches_slurm_in_any_text(key: str) -> None:
    assert f"{key}=" in refusal(flags={key: "x\n#SBATCH --wrap=id"})


@pytest.mark.parametrize(
    "bad", ["-x", "--wrap=id", "a b", "a;b", "$(id)", "`id`", "a'b", 'a"b', "a\\b", "%j", "#", "x" * 9000]
)
def test_names_in_the_cluster_hold_nothing_that_a_shell_reads(bad: str) -> None:
    message = refusal(flags={"slurm.partition": bad})
    assert message.startswith("slurm.partition=") and len(message) < 300


@pytest.mark.parametrize("key", ["account", "qos", "constraint", "exclude", "nodelist", "reservation"])
@pytest.mark.parametrize("bad", ["-x", "a;b"])
def test_every_name_in_the_cluster_is_checked(key: str, bad: str) -> None:
    assert refusal(flags={f"slurm.{key}": bad}).startswith(f"slurm.{key}=")


@pytest.mark.parametrize("text", ["gpu,cpu", "a[1-3,5]", "intel&gpu|amd*2", "[rack1|rack2]", "a100@x.y", "é"])
def test_names_in_the_cluster_keep_slurms_own_signs(text: str) -> None:
    slurm = load(flags={"slurm.partition": text, "slurm.constraint": text, "slurm.nodelist": text}).config.slurm
    assert (slurm.partition, slurm.constraint, slurm.nodelist) == (text, text, text)


@pytest.mark.parametrize("name", ["a/b", ".", "..", "-x", " ", "x" * 201, "é" * 101])
def test_names_that_are_no_directory(name: str) -> None:
    assert (
        refusal(flags={"name": name}).startswith("name=")
        if name.strip()
        else load(flags={"name": name}).config.name is None
    )


@pytest.mark.parametrize("name", ["dédé", "añejo 实验", "x" * 200, "a%j", "$(id)", "a\\b", "a'b\"c"])
def test_x07_names_that_are_a_directory(name: str) -> None:
    loaded = load(flags={"name": name})
    assert loaded.config.name == name
    assert load_text(loaded.to_yaml()) == loaded


@pytest.mark.parametrize(
    "line",
    ["exec env -i bash -l", "exec", "exit 0", "exit", "exit;", " return 1", "logout", "#SBATCH --wrap=id"]
    + ["module purge && exec env -i bash -l", "true; exec bash", "if true; then exec bash -l; fi", "{ exec zsh; }"],
)
def test_s22_setup_lines_that_end_the_script(line: str) -> None:
    assert refusal(flags={"slurm.setup": ["module load x", line]}).startswith("slurm.setup=")


@pytest.mark.parametrize(
    "line",
    ["module load x", '\texport A="$B"', "executor=1", "source 'my env/bin/activate'", "", "# é"]
    + ["true; exec 3>&1", "true && exec >>log 2>&1", "module load x || exit 1"],
)
def test_setup_lines(line: str) -> None:
    loaded = load(flags={"slurm.setup": [line]})
    assert loaded.config.slurm.setup == [line]
    assert load_text(loaded.to_yaml()) == loaded


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("nodes", "slurm.nodes"),
        ("ntasks-per-node", "launch.layout"),
        ("gpus-per-task", "slurm.gpus_per_node"),
        ("output", "run_root"),
        ("signal", "slurm.signal_lead_s"),
        ("requeue", "slurm.requeue"),
        ("no_requeue", "slurm.requeue"),
        ("wrap", "after --"),
        ("export", "slurm.setup"),
        ("job-name", "name"),
        ("outp", "whole name"),
        ("n", "long name"),
        ("mail-typ", "mail-type"),
        ("mial-type", "mail-type"),
        ("Comment", "lower case"),
        ("-x", "long name"),
        ("a b", "long name"),
        ("x;y", "long name"),
        ("é", "long name"),
    ],
)
def test_options_of_sbatch_that_have_another_place(option: str, instead: str) -> None:
    message = refusal(flags={"slurm.extra": {option: "1"}})
    assert f"slurm.extra.{option}" in message and instead in message


def test_other_options_of_sbatch() -> None:
    slurm = load(
        overrides=["slurm.extra.mail_type=END", "slurm.extra.hold=true", "slurm.extra.begin=12:00:00", "slurm.extra.array=0-3",
                   "slurm.extra.comment=010", "slurm.extra.nice=-5", "slurm.extra.site-plugin=no", "slurm.extra.gres=nvme:1"]
    ).config.slurm  # fmt: skip
    assert slurm.extra == {
        "mail-type": "END", "hold": True, "begin": "12:00:00", "array": "0-3", "comment": "010", "nice": "-5",
        "site-plugin": "no", "gres": "nvme:1",
    }  # fmt: skip
    assert "slurm.gpus_per_node" in refusal(overrides=["slurm.extra.gres=gpu:2"])
    assert "slurm.gpus_per_node" in refusal(overrides=["slurm.extra.gres=nvme:1,gpu", "slurm.gpu_request=gres"])
    assert "slurm.gpus_per_node" in refusal(overrides=["slurm.extra.tres-per-task=gres/gpu:1"])
    assert "once" in refusal(overrides=["slurm.extra.mail-type=END", "slurm.extra.mail_type=ALL"])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("launch.layout=task-per-gpus", "task-per-gpu"),
        ("launch.layout=task_per_node", "task-per-node"),
        ("slurm.gpu_request=gpu-per-node", "gpus-per-node"),
        ("launch.code=life", "live"),
        ("train.precision=bf61", "bf16"),
        ("train.device=gpu", "cuda"),
        ("train.strategy=dpp", "ddp"),
        ("slurm.signal=USR3", "USR2"),
        ("slurm.signal=KILL", "TERM"),
        ("slurm.signal_lead_s=65536", "65535"),
        ("slurm.signal_lead_s=-1", "0"),
        ("launch.preload=[a-b]", "module"),
        ("launch.rendezvous_timeout_s=nan", "finite"),
        ("launch.workers_per_node=0", "at least 1"),
    ],
)
def test_choices_and_ranges(text: str, right: str) -> None:
    assert right in refusal(overrides=[text])


def test_quantities_are_in_slurms_notation() -> None:
    slurm = load(
        overrides=["slurm.mem=64 GiB", "slurm.signal=sigterm", "slurm.time=0", "slurm.gpus_per_node=04"]
    ).config.slurm
    assert (slurm.mem, slurm.signal, slurm.time, slurm.gpus_per_node) == ("64G", "TERM", "UNLIMITED", "4")


def test_home_in_a_run_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(files=[yaml_file("run_root: ~/runs")]).config.run_root == "/home/me/runs"


def test_every_rule_names_a_setting() -> None:
    known = set(fields.known_paths(fields.field_types(Config)))
    assert known >= {*rules.CHOICES, *rules.RANGES, *rules._READERS, *rules._TEXT_RULES}
    assert known >= {f"slurm.{name}" for group in rules.EXCLUSIVE for name in group}
