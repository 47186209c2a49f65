"""YAML and command-line values as a tree of texts: what was written, and where; no type is guessed here.

PyYAML reads `12:00:00` as 43200, `010` as 8 and `no` as False (YAML 1.1). Here a scalar keeps its text until the type
of the setting is known: hpc/fields.py turns the text into a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpc.errors import ConfigError, printable

SIZE_LIMIT = 1 << 20
NODE_LIMIT = 100_000
DEPTH_LIMIT = 40
COMMAND_LINE = "command line"

_PLAIN = "plain"
_TEXT = "tag:yaml.org,2002:str"
_LIST = "tag:yaml.org,2002:seq"
_MAPPING = "tag:yaml.org,2002:map"


@dataclass(frozen=True)
class Scalar:
    """One text; `plain` when it was written without quotes, so that it may be a number or null."""

    text: str
    plain: bool
    where: str


@dataclass(frozen=True)
class Sequence:
    """A list; `source` is the text it was read from on the command line."""

    items: list[Node]
    where: str
    source: str | None = None


@dataclass(frozen=True)
class Branch:
    """A mapping; `key_where` says for each key where it was written."""

    entries: dict[str, Node]
    where: str
    key_where: dict[str, str] = field(default_factory=dict)
    source: str | None = None


Node = Scalar | Sequence | Branch


class _Loader(yaml.SafeLoader):
    """SafeLoader that tells only plain from quoted, and guesses nothing."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TEXT
        return _LIST if kind is yaml.SequenceNode else _MAPPING


def read_file(path: Path) -> Branch:
    """The mapping in a UTF-8 YAML file of at most 1 MiB; an empty file is an empty mapping.

    Raises:
        ConfigError: unreadable, too large, not UTF-8, not YAML, not a mapping, or a key given twice.
    """
    name = str(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {name}: {error.strerror or error}") from None
    if len(data) > SIZE_LIMIT:
        raise ConfigError(f"{name}: larger than 1 MiB; a configuration file was needed")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}, line {line}: not UTF-8; save the file as UTF-8") from None
    return read_text(text, name)


def read_text(text: str, name: str) -> Branch:
    """The mapping in a YAML text; `name` says in messages where the text is from.

    Raises:
        ConfigError: not YAML, not a mapping, a key given twice, or more than 100,000 values.
    """
    if len(text) > SIZE_LIMIT:
        raise ConfigError(f"{name}: larger than 1 MiB")
    node = _compose(text, name)
    if node is None:
        return Branch({}, name)
    tree = _Converter(name).convert(node, 0)
    if not isinstance(tree, Branch):
        raise ConfigError(f'{tree.where}: needs settings such as "slurm: {{nodes: 2}}", found {describe(tree)}')
    return tree


def read_override(text: str, where: str = COMMAND_LINE) -> Branch:
    """`a.b=value` as a tree. A value in brackets, braces or quotes is YAML where it can be; anything else is its text.

    Raises:
        ConfigError: there is no `=`, a part of the key is empty, or a byte is not UTF-8.
    """
    key, separator, value = text.partition("=")
    parts = key.split(".")
    if not separator or not all(parts) or key != key.strip():
        raise ConfigError(f"{where}: {printable(text)!r} is no setting; write it as key=value, such as train.epochs=3")
    if len(parts) > DEPTH_LIMIT:
        raise ConfigError(
            f"{where}: a key of {len(parts)} parts; no setting is nested more than {DEPTH_LIMIT} levels deep"
        )
    node: Node = _read_value(value, where)
    for part in reversed(parts):
        node = Branch({part: node}, where, {part: where})
    return node  # type: ignore[return-value]  # parts is never empty


def from_value(value: Any, where: str) -> Node:
    """A Python value (of a flag) as a tree; a string is the text that the user typed.

    Raises:
        ConfigError: a value of another type than text, number, bool, path, list or mapping.
    """
    if value is None:
        return Scalar("null", True, where)
    if isinstance(value, bool):
        return Scalar("true" if value else "false", True, where)
    if isinstance(value, (str, int, float)):
        return Scalar(str(value), True, where)
    if isinstance(value, Path):
        return Scalar(str(value), False, where)
    if isinstance(value, Mapping):
        entries = {str(key): from_value(inner, where) for key, inner in value.items()}
        return Branch(entries, where, dict.fromkeys(entries, where))
    if isinstance(value, Iterable):
        return Sequence([from_value(inner, where) for inner in value], where)
    raise ConfigError(f"{where}: a value of type {type(value).__name__} cannot be a setting")


def describe(node: Node) -> str:
    """What a node is, in words for a message."""
    if isinstance(node, Scalar):
        return repr(node.text) if len(node.text) <= 80 else f"{node.text[:77]!r}..."
    return "a list" if isinstance(node, Sequence) else "a group of settings"


def _read_value(text: str, where: str) -> Node:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ConfigError(f"{where}: {printable(text)!r} is not UTF-8")
    bare = text.strip()
    if (bare[:1], bare[-1:]) not in {("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")}:
        return Scalar(text, True, where)
    try:
        node = _compose(text, where)
        tree = _Converter(where, lines=False).convert(node, 0) if node is not None else None
    except ConfigError:
        return Scalar(text, True, where)  # not YAML, so it is meant as a text
    if isinstance(tree, Sequence):
        return Sequence(tree.items, where, text)
    if isinstance(tree, Branch):
        return Branch(tree.entries, where, tree.key_where, text)
    return tree or Scalar(text, True, where)


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deep") from None


class _Converter:
    """PyYAML's nodes to ours, with limits, so that a short text with many aliases cannot grow without end."""

    def __init__(self, name: str, *, lines: bool = True) -> None:
        self.name = name
        self.lines = lines
        self.count = 0

    def where(self, node: yaml.Node) -> str:
        return f"{self.name}, line {node.start_mark.line + 1}" if self.lines else self.name

    def convert(self, node: yaml.Node, depth: int) -> Node:
        where = self.where(node)
        self.count += 1
        if self.count > NODE_LIMIT:
            raise ConfigError(f"{where}: more than {NODE_LIMIT} values")
        if depth > DEPTH_LIMIT:
            raise ConfigError(f"{where}: nested more than {DEPTH_LIMIT} levels deep")
        if node.tag not in (_PLAIN, _TEXT, _LIST, _MAPPING):
            raise ConfigError(f"{where}: the tag {node.tag} is not read; write the value without it")
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, node.tag == _PLAIN, where)
        if isinstance(node, yaml.SequenceNode):
            return Sequence([self.convert(item, depth + 1) for item in node.value], where)
        entries: dict[str, Node] = {}
        key_where: dict[str, str] = {}
        for key_node, value_node in node.value:
            key, place = self._key(key_node)
            if key in entries:
                raise ConfigError(f"{place}: the key {key} is given twice (first at {key_where[key]}); keep one")
            entries[key] = self.convert(value_node, depth + 1)
            key_where[key] = place
        return Branch(entries, where, key_where)

    def _key(self, node: yaml.Node) -> tuple[str, str]:
        place = self.where(node)
        if not isinstance(node, yaml.ScalarNode):
            raise ConfigError(f"{place}: a key must be a single word")
        if node.tag == _PLAIN and node.value == "<<":
            raise ConfigError(
                f"{place}: merge keys (<<) are not read; repeat the settings, or give a second --config file"
            )
        return str(node.value), place


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(values: Mapping[str, Any]) -> str:
    """Plain values as YAML that reads back to the same values here, and in any YAML 1.1 or 1.2 reader.

    Every string whose text could be taken for something else is written in quotes.
    """
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    ordinary = text[:1].isalpha() and all(c.isalnum() or c in "_./-" for c in text) and text.isascii()
    ordinary = ordinary and text.lower() not in _WORDS
    return dumper.represent_scalar(_TEXT, text, style=None if ordinary else '"')


def _represent_float(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    text = repr(number)
    if text in ("inf", "-inf", "nan"):
        text = text.replace("inf", ".inf").replace("nan", ".nan")
    elif "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
