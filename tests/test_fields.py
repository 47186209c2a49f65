from __future__ import annotations

import math
from pathlib import Path

import pytest
from refusals import refusal, yaml_file

from hpc.config import load, load_text

pytestmark = pytest.mark.usefixtures("nobody_elses_settings")


@pytest.mark.parametrize("text", ["12:00:00", "1:30:00", "01:30:00", "2-00:00:00", "90", "90:00", "1-12"])
@pytest.mark.parametrize("by", ["yaml", "quoted yaml", "override", "flag"])
def test_s16_time_is_what_the_user_wrote(text: str, by: str) -> None:
    if by == "yaml":
        loaded = load(files=[yaml_file(f"slurm:\n  time: {text}\n")])
    elif by == "quoted yaml":
        loaded = load(files=[yaml_file(f"slurm: {{time: '{text}'}}\n")])
    elif by == "override":
        loaded = load(overrides=[f"slurm.time={text}"])
    else:
        loaded = load(flags={"slurm.time": text})
    assert loaded.config.slurm.time == text
    assert load_text(loaded.to_yaml()).config.slurm.time == text


def test_s16_a_time_in_flow_yaml_stays_a_time() -> None:
    loaded = load(files=[yaml_file("slurm: {time: 12:00:00, gpus_per_node: a100:4, nodes: 2}")])
    assert (loaded.config.slurm.time, loaded.config.slurm.gpus_per_node, loaded.config.slurm.nodes) == (
        "12:00:00",
        "a100:4",
        2,
    )


def test_s16_no_notation_of_slurm_is_refused_with_all_of_them() -> None:
    message = refusal(files=[yaml_file("slurm:\n  time: 12h\n")])
    assert "slurm.time='12h' (a.yaml, line 2)" in message
    assert "D-HH:MM:SS" in message


def test_s17_72_hours_reach_the_config_as_72_hours() -> None:
    assert load(overrides=["slurm.time=72:00:00"]).config.slurm.time == "72:00:00"


@pytest.mark.parametrize(
    "text", ["12:00:00", "1:30:00", "010", "no", "1.10", "1e3", "0x1F", "1_000", "true", "2001-01-01", "=", "a b"]
)
def test_a_text_setting_keeps_its_text(text: str, all_types: str) -> None:
    by_file = load(job=all_types, files=[yaml_file(f"text: {text}\nmany: [{text}]\ntable: {{k: {text}}}\n")])
    by_word = load(job=all_types, overrides=[f"text={text}", f"many=[{text}]", f"table.k={text}"])
    by_flag = load(job=all_types, flags={"text": text, "many": [text], "table.k": text})
    for loaded in (by_file, by_word, by_flag):
        assert loaded.parameters.text == text
        assert loaded.parameters.many == [text]
        assert loaded.parameters.table == {"k": text}


@pytest.mark.parametrize("written", ["null", "~", "Null", "NULL", ""])
def test_null_where_nothing_is_possible(written: str, all_types: str) -> None:
    base = yaml_file("maybe: x\nmaybe_rate: 3\n", "base.yaml")
    by_file = load(job=all_types, files=[base, yaml_file(f"maybe: {written}\nmaybe_rate: {written}\n")])
    by_word = load(job=all_types, files=[base], overrides=[f"maybe={written}", f"maybe_rate={written}"])
    for loaded in (by_file, by_word):
        assert loaded.parameters.maybe is None
        assert loaded.parameters.maybe_rate is None


def test_null_in_quotes_is_a_word(all_types: str) -> None:
    assert load(job=all_types, overrides=['maybe="null"']).parameters.maybe == "null"
    assert load(job=all_types, files=[yaml_file("maybe: 'null'")]).parameters.maybe == "null"


def test_null_where_it_is_not_possible(all_types: str) -> None:
    assert "null is not possible" in refusal(job=all_types, overrides=["text=null"])
    assert "null is not possible" in refusal(job=all_types, overrides=["count=null"])
    assert load(job=all_types, overrides=["text="]).parameters.text == ""


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("count", "12", 12),
        ("count", "-3", -3),
        ("count", "1_000_000", 1_000_000),
        ("count", "1e6", 1_000_000),
        ("count", "1.5e3", 1500),
        ("count", '"12"', 12),
        ("rate", "1e-4", 1e-4),
        ("rate", "1E-4", 1e-4),
        ("rate", "3", 3.0),
        ("rate", ".5", 0.5),
        ("rate", "5.", 5.0),
        ("rate", "-inf", -math.inf),
        ("rate", ".inf", math.inf),
        ("maybe_rate", "3e-4", 3e-4),
        ("flag", "yes", True),
        ("flag", "on", True),
        ("flag", "True", True),
        ("flag", "no", False),
        ("flag", "off", False),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("either", '"7"', "7"),
        ("path", "a/b", Path("a/b")),
        ("anything", "12:00:00", "12:00:00"),
        ("anything", "010", 10),
        ("anything", "no", "no"),
        ("anything", "true", True),
        ("anything", "1e-4", 1e-4),
        ("anything", "[1, a, {b: 2.5}]", [1, "a", {"b": 2.5}]),
        ("anything", "1.10.2", "1.10.2"),
        ("bag", "{x: 1:30, y: 2}", {"x": "1:30", "y": 2}),
        ("many", '["module load x", b]', ["module load x", "b"]),
        ("optim.betas", "[0.8,0.99]", (0.8, 0.99)),
    ],
)
def test_values_are_of_their_settings_type(key: str, written: str, value: object, all_types: str) -> None:
    *groups, last = key.split(".")
    text = "".join(f"{'  ' * depth}{group}:\n" for depth, group in enumerate(groups))
    by_file = load(job=all_types, files=[yaml_file(f"{text}{'  ' * len(groups)}{last}: {written}\n")])
    by_word = load(job=all_types, overrides=[f"{key}={written}"])
    for loaded in (by_file, by_word):
        found = loaded.parameters
        for part in key.split("."):
            found = getattr(found, part)
        assert found == (list(value) if isinstance(found, list) and isinstance(value, tuple) else value)
        assert type(found) is type(value) or isinstance(value, tuple)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("count", "2.5"),
        ("count", "4x"),
        ("count", "010"),
        ("count", "0x10"),
        ("count", "1:30"),
        ("count", "1e-3"),
        ("count", "1.5e0"),
        ("count", "true"),
        ("count", "9" * 5000),
        ("count", "1e999999999"),
        ("count", "[1]"),
        ("rate", "fast"),
        ("rate", "1:30"),
        ("flag", "maybe"),
        ("flag", "2"),
        ("many", "a"),
        ("many", "[oops"),
        ("table", "a"),
        ("optim", "3"),
        ("optim.betas", "[0.9]"),
        ("optim.betas", "[a, b]"),
        ("colour", "GREEN"),
    ],
)
def test_values_that_cannot_be_meant(key: str, written: str, all_types: str) -> None:
    message = refusal(job=all_types, overrides=[f"{key}={written}"])
    assert message.startswith(key)
    assert "command line" in message
    assert "needs" in message
    assert len(message) < 300


def test_names_of_an_enum(all_types: str) -> None:
    loaded = load(job=all_types, overrides=["colour=BLUE"])
    assert loaded.parameters.colour.name == "BLUE"
    assert load_text(loaded.to_yaml()) == loaded
    assert "RED, BLUE" in refusal(job=all_types, overrides=["colour=blu"])


@pytest.mark.parametrize(
    ("text", "where", "right"),
    [
        ("gpus_per_nodes: 8", "a.yaml, line 1", "slurm.gpus_per_node"),
        ("slurm:\n  gpus_per_nodes: 8", "a.yaml, line 2", "slurm.gpus_per_node"),
        ("# one\n\ntrain:\n  epoch: 1", "a.yaml, line 4", "train.epochs"),
        ("sluRm: {nodes: 1}", "a.yaml, line 1", "slurm.nodes"),
        ("sluRm:", "a.yaml, line 1", "slurm"),
        ("slurm: {gpus-per-node: 1}", "a.yaml, line 1", "slurm.gpus_per_node"),
    ],
)
def test_s18_unknown_key_in_a_file(text: str, where: str, right: str) -> None:
    message = refusal(files=[yaml_file(text)])
    assert f"({where})" in message
    assert f"did you mean {right}?" in message


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("train.epoch", "train.epochs"),
        ("epochs", "train.epochs"),
        ("gpus_per_node", "slurm.gpus_per_node"),
        ("nodes", "slurm.nodes"),
        ("time", "slurm.time"),
        ("traim.epochs", "train.epochs"),
        ("train.epochs.x", "train.epochs"),
        ("slurm.gpus_pernode", "slurm.gpus_per_node"),
        ("lr", "optim.lr"),
        ("optim.learnrate", None),
        ("zzzz", None),
    ],
)
def test_s18_unknown_key_on_the_command_line(key: str, right: str | None, all_types: str) -> None:
    if key == "train.epochs.x":
        assert "train.epochs" in refusal(job=all_types, overrides=[f"{key}=1"])
        return
    message = refusal(job=all_types, overrides=[f"{key}=1"])
    assert f"unknown key {key} (command line)" in message
    assert (f"did you mean {right}?" in message) if right else ("did you mean" not in message)
    assert refusal(job=all_types, flags={key: 1}) == message


def test_s18_an_option_of_sbatch_is_shown_its_place() -> None:
    assert "slurm.extra.NAME" in refusal(overrides=["slurm.licenses=x"])
