"""What a text means for the type of its setting, and which setting an unknown key was meant to be.

The types are those of dataclass fields that OmegaConf knows: str, int, float, bool, Any, Optional and other unions,
Literal, Enum, Path, list, tuple, dict and dataclasses in each other.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import re
import types
import typing
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from pathlib import Path
from typing import Any, Union

from hpc.errors import ConfigError
from hpc.yamltext import Branch, Node, Scalar, Sequence, describe

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_WHOLE = re.compile(r"([-+]?)([0-9]+)(?:\.([0-9]+))?[eE]\+?([0-9]{1,2})")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.?inf(inity)?", re.IGNORECASE)
_NAN = re.compile(r"\.?nan", re.IGNORECASE)
_CORE_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DIGITS_LIMIT = 30


@functools.cache
def field_types(schema: type) -> Mapping[str, Any]:
    """The settings of a dataclass and their types, in order; a name that cannot be looked up has type Any."""
    try:
        hints = typing.get_type_hints(schema)
    except (NameError, TypeError):
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(schema)}


def known_paths(types_of: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all settings, groups included."""
    paths = []
    for name, target in types_of.items():
        paths.append(prefix + name)
        inner = _dataclass_of(target)
        if inner is not None and prefix.count(".") < 8:
            paths += known_paths(field_types(inner), f"{prefix}{name}.")
    return paths


def read_branch(branch: Branch, types_of: Mapping[str, Any], known: AnySequence[str], path: str = "") -> dict[str, Any]:
    """The values of a tree, each of its setting's type; `known` are all dotted names, for the nearest right one.

    Raises:
        ConfigError: a key that does not exist, or a value that its setting cannot take.
    """
    values: dict[str, Any] = {}
    for key, node in branch.entries.items():
        dotted = f"{path}.{key}" if path else key
        if key not in types_of:
            place = branch.key_where.get(key, branch.where)
            while isinstance(node, Branch) and len(node.entries) == 1:  # the key as it was typed, to its end
                dotted, node = f"{dotted}.{next(iter(node.entries))}", next(iter(node.entries.values()))
            raise ConfigError(_unknown(dotted, place, known))
        values[key] = read_value(node, types_of[key], known, dotted)
    return values


def read_value(node: Node, target: Any, known: AnySequence[str], path: str) -> Any:
    """One value, of its setting's type.

    Raises:
        ConfigError: a text that does not mean a value of that type; names the place, the setting and the text.
    """
    if target is Any or target is object:
        return _untyped(node)
    origin = typing.get_origin(target)
    if origin in (Union, types.UnionType):
        return _union(node, typing.get_args(target), known, path)
    if _is_null(node) and target is not str:
        raise _refused(node, path, f"{_name_of(target)}; null is not possible here")
    if dataclasses.is_dataclass(target):
        if not isinstance(node, Branch):
            inner = next(iter(field_types(typing.cast(type, target))), "name")
            raise _refused(node, path, f"a group of settings, such as {path}.{inner}=VALUE")
        return read_branch(node, field_types(typing.cast(type, target)), known, path)
    container = origin or target
    if container in (list, tuple) or container is AnySequence:
        return _list(node, typing.get_args(target), known, path)
    if container is dict or container is Mapping:
        return _dict(node, typing.get_args(target), known, path)
    if origin is typing.Literal:
        return _literal(node, typing.get_args(target), path)
    text = _text(node, target, path)
    if target is str:
        return text
    return _scalar(node, text.strip(), target, path)


def _untyped(node: Node) -> Any:
    if isinstance(node, Branch):
        return {key: _untyped(inner) for key, inner in node.entries.items()}
    if isinstance(node, Sequence):
        return [_untyped(inner) for inner in node.items]
    return core_value(node.text.strip()) if node.plain else node.text


def core_value(text: str) -> Any:
    """A plain scalar by the core schema of YAML 1.2: 1:30 and 2-3 are text, 010 is 10, 0o17 and 0x1F are numbers.

    Source: YAML 1.2.2, 10.3.2 (number texts of more than 30 digits stay text).
    """
    if text in _NULL:
        return None
    if text in _CORE_BOOL:
        return _CORE_BOOL[text]
    if len(text) <= _DIGITS_LIMIT:
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return int(text)
        if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", text):
            return int(text, 0)
        if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
            return float(text)
        if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
            return float(text.replace(".", ""))
    return text


def _union(node: Node, members: tuple[Any, ...], known: AnySequence[str], path: str) -> Any:
    optional = type(None) in members
    others = [member for member in members if member is not type(None)]
    if optional and _is_null(node):
        return None
    if len(others) == 1:
        return read_value(node, others[0], known, path)
    if isinstance(node, Scalar) and node.plain:
        value = core_value(node.text.strip())
        if type(value) in others:
            return value
        if isinstance(value, int) and not isinstance(value, bool) and float in others:
            return float(value)
    if str in others and (isinstance(node, Scalar) or node.source is not None):
        return _text(node, str, path)
    for member in others:
        try:
            return read_value(node, member, known, path)
        except ConfigError:
            continue
    raise _refused(node, path, " or ".join(_name_of(member) for member in others))


def _list(node: Node, arguments: tuple[Any, ...], known: AnySequence[str], path: str) -> list[Any]:
    if not isinstance(node, Sequence):
        shown = node.text.strip() if isinstance(node, Scalar) and len(node.text) < 60 else "a, b"
        raise _refused(node, path, f"a list: [{shown}]")
    fixed = len(arguments) > 0 and arguments[-1] is not Ellipsis and len(arguments) > 1
    if fixed and len(arguments) != len(node.items):
        raise _refused(node, path, f"a list of {len(arguments)} values, not {len(node.items)}")
    values = []
    for index, item in enumerate(node.items):
        target = (arguments[index] if fixed else arguments[0]) if arguments else Any
        values.append(read_value(item, target, known, f"{path}[{index}]"))
    return values


def _dict(node: Node, arguments: tuple[Any, ...], known: AnySequence[str], path: str) -> dict[Any, Any]:
    if not isinstance(node, Branch):
        raise _refused(node, path, f"names with values, such as {path}.NAME=VALUE")
    key_type, value_type = arguments or (str, Any)
    values = {}
    for key, inner in node.entries.items():
        place = node.key_where.get(key, node.where)
        typed = key if key_type in (str, Any) else read_value(Scalar(key, True, place), key_type, known, path)
        values[typed] = read_value(inner, value_type, known, f"{path}.{key}")
    return values


def _literal(node: Node, choices: tuple[Any, ...], path: str) -> Any:
    text = _text(node, str, path)
    for choice in choices:
        if str(choice) == text.strip():
            return choice
    raise _refused(node, path, one_of(text, [str(choice) for choice in choices]))


def _scalar(node: Node, text: str, target: Any, path: str) -> Any:
    if target is bool:
        if text.lower() in _BOOL:
            return _BOOL[text.lower()]
    elif target is int:
        return _whole(node, text, path)
    elif target is float:
        number = _number(text)
        if number is not None:
            return number
    elif target is Path:
        return Path(text)
    elif isinstance(target, type) and issubclass(target, enum.Enum):
        if text in target.__members__:
            return target[text]
        raise _refused(node, path, one_of(text, list(target.__members__)))
    else:
        return core_value(text)
    raise _refused(node, path, _name_of(target))


def _whole(node: Node, text: str, path: str) -> int:
    if _INT.fullmatch(text) and len(text) <= _DIGITS_LIMIT:
        digits = text.lstrip("+-")
        if len(digits) > 1 and digits.startswith("0"):
            raise _refused(node, path, f"a whole number without leading zeros ({digits.lstrip('0') or '0'})")
        return int(text)
    match = _WHOLE.fullmatch(text)
    if match and len(text) <= _DIGITS_LIMIT:
        sign, whole, fraction, exponent = match[1], match[2], (match[3] or "").rstrip("0"), int(match[4])
        if len(fraction) <= exponent <= 18:
            return int(sign + whole + fraction.ljust(exponent, "0"))
    raise _refused(node, path, "a whole number")


def _number(text: str) -> float | None:
    if _FLOAT.fullmatch(text):
        return float(text)
    infinite = _INFINITE.fullmatch(text)
    if infinite:
        return float(f"{infinite[1]}inf")
    return float("nan") if _NAN.fullmatch(text) else None


def _text(node: Node, target: Any, path: str) -> str:
    if isinstance(node, Scalar):
        if target is str and node.plain and node.text in _NULL - {""}:
            raise _refused(node, path, "a text; for the word itself put quotes around it, null is not possible here")
        return node.text
    if target is str and node.source is not None:
        return node.source
    raise _refused(node, path, _name_of(target))


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text.strip() in _NULL


def _dataclass_of(target: Any) -> type | None:
    members = typing.get_args(target) if typing.get_origin(target) in (Union, types.UnionType) else (target,)
    for member in members:
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def _name_of(target: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    if target in names:
        return names[target]
    container = typing.get_origin(target) or target
    if container in (list, tuple):
        return "a list"
    return "a group of settings" if container is dict or dataclasses.is_dataclass(target) else "a value"


def _refused(node: Node, path: str, needed: str) -> ConfigError:
    return ConfigError(f"{path}={describe(node)} ({node.where}): needs {needed}")


def one_of(text: str, choices: AnySequence[str]) -> str:
    """The choices in words, the nearest one first asked for: "one of a, b; did you mean a?"."""
    close = difflib.get_close_matches(text.strip().lower(), choices, n=1, cutoff=0.5)
    return f"one of {', '.join(choices)}" + (f"; did you mean {close[0]}?" if close else "")


def nearest(path: str, known: AnySequence[str]) -> str | None:
    """The setting that an unknown dotted key was most likely meant to be, or None.

    Dashes count as underscores; the last part counts most, so that a key without its group is found too.
    """
    wanted = path.lower().replace("-", "_")
    leaf = wanted.rpartition(".")[2]
    best, best_score = None, 0.0
    for candidate in known:
        candidate_leaf = candidate.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, wanted, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio()
        score = max(whole, last) + 0.1 * whole
        if max(whole, last) >= 0.7 and score > best_score:
            best, best_score = candidate, score
    return best


def _unknown(path: str, where: str, known: AnySequence[str]) -> str:
    close = nearest(path, known)
    advice = f"did you mean {close}?" if close else "no setting has a name like it"
    if path.startswith("slurm."):
        advice += " (any other option of sbatch: slurm.extra.NAME=VALUE)"
    return f"unknown key {path} ({where}); {advice}"
