from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import refusal, yaml_file

from hpc.config import load, load_text

pytestmark = pytest.mark.usefixtures("nobody_elses_settings")


@pytest.mark.parametrize(
    "name",
    [
        r"lr\=0.1;x",
        "a=b",
        "a b",
        "[x",
        "[x]",
        "{x}",
        "it's",
        "'x",
        "$(id)",
        "`id`",
        "a: b",
        "a # b",
        "dédé",
        "实验",
        " x ",
    ],
)
def test_s15_a_name_reaches_the_config_unchanged(name: str) -> None:
    loaded = load(overrides=[f"name={name}"])
    assert loaded.config.name == name
    assert load(flags={"name": name}).config.name == name
    assert load_text(loaded.to_yaml()) == loaded


def test_quotes_around_a_whole_value_are_taken_off() -> None:
    assert load(overrides=["name='a b'"]).config.name == "a b"
    assert load(overrides=['name="dédé"']).config.name == "dédé"


def test_a_list_on_the_command_line() -> None:
    setup = load(overrides=['slurm.setup=["module load x", "export A=${B}"]']).config.slurm.setup
    assert setup == ["module load x", "export A=${B}"]
    assert "[module load x]" in refusal(overrides=["slurm.setup=module load x"])


@pytest.mark.parametrize("text", ["", "=3", "train.epochs", "a..b=1", ".a=1", "train.=1", "a b", " train.epochs=1"])
def test_what_is_no_setting(text: str) -> None:
    assert "key=value" in refusal(overrides=[text])


@pytest.mark.slow
def test_very_deep_keys_and_values_are_refused() -> None:
    deep = ".".join("a" * 100_000)
    assert "parts" in refusal(overrides=[f"{deep}=1", f"{deep}=2"])
    refusal(overrides=["slurm.setup=" + "[" * 5000 + "]" * 5000])
    assert "deep" in refusal(files=[yaml_file("a: " + "[" * 5000)])


def test_bytes_that_are_no_text_are_refused() -> None:
    assert "not UTF-8" in refusal(overrides=["name=" + os.fsdecode(b"\xff")])


def test_the_interpolation_of_omegaconf_is_off(monkeypatch: pytest.MonkeyPatch, all_types: str) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    for text in ("${oc.env:MY_TOKEN}", "${train.seed}", r"\${x}", r"\\${x}", "${", "$${x}", "${a:${b}}"):
        loaded = load(job=all_types, overrides=[f"text={text}", f"anything={text}"])
        assert loaded.parameters.text == text
        assert loaded.parameters.anything == text
        assert "hush" not in loaded.to_yaml()
        assert load_text(loaded.to_yaml()) == loaded
    assert "a whole number" in refusal(overrides=["train.epochs=${train.seed}"])


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    message = refusal(files=[yaml_file("slurm:\n  nodes: 1\n  time: 5\n  nodes: 2\n")])
    assert "line 4" in message and "line 2" in message and "nodes" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1", "line 1"),
        ("slurm:\n\tnodes: 1", "line 2"),
        ("- a\n- b", "found a list"),
        ("hello", "found 'hello'"),
        ("name: !!python/object/apply:os.system [id]", "tag"),
        ("name: !!int '3'", "tag"),
        ("[a]: b", "key"),
        ("<<: {name: x}", "merge keys"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("name: '\x00'", "not YAML"),
    ],
)
def test_files_that_are_no_configuration(text: str, part: str) -> None:
    message = refusal(files=[yaml_file(text)])
    assert message.startswith("a.yaml")
    assert part in message


def test_files_that_cannot_be_read() -> None:
    assert "nosuch.yaml" in refusal(files=[Path("nosuch.yaml")])
    Path("latin.yaml").write_bytes(b"slurm:\n  nodes: 1\nname: d\xe9d\xe9\n")
    assert "latin.yaml, line 3: not UTF-8" in refusal(files=[Path("latin.yaml")])
    Path("big.yaml").write_text("#" * (1 << 20) + "\n")
    assert "1 MiB" in refusal(files=[Path("big.yaml")])
    assert "cannot read" in refusal(files=[Path(".")])


def test_many_aliases_cannot_grow_without_end(all_types: str) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    text = "bag:\n" + "".join(f"  {line}\n" for line in lines)
    assert "more than 100000 values" in refusal(job=all_types, files=[yaml_file(text)])
    assert "deep" in refusal(job=all_types, files=[yaml_file("anything: &a [*a]\n")])


def test_an_empty_file_and_a_byte_order_mark_are_fine() -> None:
    assert load(files=[yaml_file("")]) == load() == load(files=[yaml_file("# nothing\n", "b.yaml")])
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbfslurm: {nodes: 3}\n")
    assert load(files=[Path("bom.yaml")]).config.slurm.nodes == 3
