"""The configuration of a run: dataclasses <- YAML files <- flags <- key=value, strict, without torch, written back.

Later wins: defaults of hpc/schema.py, the site's file, the job's base.yaml, --config files, flags, key=value.
`${...}` is ordinary text everywhere: nothing is looked up in the environment or elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from hpc import fields, rules, yamltext
from hpc.errors import ConfigError, printable
from hpc.rundir import WORKDIR_VARIABLE
from hpc.schema import Config
from hpc.yamltext import Branch

SITE_VARIABLE = "HPC_SITE_CONFIG"
HANDED_ON = "HPC_CONFIG"
_JOB_KEYS = ("job", "command")


@dataclass(frozen=True)
class Loaded:
    """A whole configuration, checked: the toolkit's settings and the parameters of the training job."""

    config: Config
    parameters: Any
    """An instance of the job's own `Config`; None when a command runs instead of a training job."""

    def to_yaml(self) -> str:
        """All settings as YAML; `load_text`, or `load` with a file of it, gives an equal configuration."""
        values = plain(self.config)
        if self.parameters is not None:
            values.update(plain(self.parameters))
        return yamltext.dump(values)


def load(
    *,
    job: str | None = None,
    command: Sequence[str] = (),
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] = {},  # never written to
    site: bool = True,
) -> Loaded:
    """The configuration for one run, from everything the user said.

    `overrides` are texts "a.b=value"; `flags` maps dotted names to values, of which None means: not given. A flag's
    text is taken as it is, a value of an override may be YAML in brackets, braces or quotes.

    Raises:
        ConfigError: an unknown key (with the nearest right one), a value that cannot be meant, a file that cannot be
            read, or a job that does not exist; the message says where it was written.
    """
    if job is not None and command:
        raise ConfigError(f"both a job ({job}) and a command (after --) are given; needs one of them")
    site_layers = [yamltext.read_file(path) for path in _site_files()] if site else []
    file_layers = [yamltext.read_file(Path(path)) for path in files]
    typed = _flag_layer(flags)
    for text in overrides:
        typed = _combined(typed, yamltext.read_override(text))
    if job is not None:
        typed = _combined(typed, _entry("job", job))
    if job is not None and "command" not in typed.entries or command:
        typed = _combined(typed, _entry("command", list(command)))
    return _merge(site_layers, [*file_layers, typed])


def load_text(yaml_text: str) -> Loaded:
    """The configuration that `Loaded.to_yaml` wrote, with no other file read.

    Raises:
        ConfigError: as `load`.
    """
    return _merge([], [yamltext.read_text(yaml_text, HANDED_ON)], base=False)


def plain(settings: Any) -> dict[str, Any]:
    """A dataclass instance as plain values (text, numbers, lists, dicts), as YAML can hold them."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def job_names() -> list[str]:
    """The training jobs of all jobs/ folders that can be imported, as "jobs.NAME", sorted."""
    _search_working_directory()
    spec = importlib.util.find_spec("jobs")
    found: set[str] = set()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.name.isidentifier() and (Path(entry.path) / "config.py").is_file():
                found.add(f"jobs.{entry.name}")
    return sorted(found)


def _merge(below_job: list[Branch], above_job: list[Branch], *, base: bool = True) -> Loaded:
    layers = below_job + above_job
    known = fields.known_paths(fields.field_types(Config))
    chosen: dict[str, Any] = {}
    for layer in layers:
        only = Branch({k: v for k, v in layer.entries.items() if k in _JOB_KEYS}, layer.where, layer.key_where)
        chosen.update(fields.read_branch(only, fields.field_types(Config), known))
    types_of = dict(fields.field_types(Config))
    parameters_type: type | None = None
    if not chosen.get("command"):
        job = chosen.get("job", Config.job)
        parameters_type, base_file = _job_schema(job, _where(layers, "job"))
        types_of |= _beside(parameters_type, job)
        if base and base_file.exists():
            layers = [*below_job, _base_layer(base_file), *above_job]
    known = fields.known_paths(types_of)
    values = [_one_of_each(fields.read_branch(layer, types_of, known)) for layer in layers]
    origins = _origins(layers)
    try:
        config = _instance(Config, values, "the toolkit's settings")
        config.command = chosen.get("command", [])
        parameters = None
        if parameters_type is not None:
            parameters = _instance(parameters_type, values, f"parameters of {config.job}")
    except ConfigError as error:
        raise ConfigError(_with_origin(str(error), origins)) from None
    return Loaded(rules.checked(config, origins), parameters)


def _one_of_each(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer with null for what a setting of it takes the place of: mem_per_gpu here ends a mem of an earlier file."""
    slurm = layer.get("slurm", {})
    replaced = {
        other: None
        for group in rules.EXCLUSIVE
        if any(slurm.get(name) is not None for name in group)
        for other in group
        if other not in slurm
    }
    return {**layer, "slurm": slurm | replaced} if replaced else layer


def _instance(schema: type, layers: list[dict[str, Any]], what: str) -> Any:
    """The merged layers as an instance of the dataclass; keys of other schemas are left out."""
    names = {field.name for field in dataclasses.fields(schema)} - {
        "command"
    }  # a command is never a "???" of OmegaConf
    try:
        own = [_escaped({key: value for key, value in layer.items() if key in names}) for layer in layers]
        merged = OmegaConf.unsafe_merge(OmegaConf.structured(schema), *own)  # no copies: nothing else holds these
        return OmegaConf.to_object(merged)
    except MissingMandatoryValue:
        missing = sorted(OmegaConf.missing_keys(merged))
        raise ConfigError(f"{what}: {', '.join(missing)} has no value; give {missing[0]}=VALUE") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        message = str(error.msg if getattr(error, "msg", None) else error).splitlines()[0]
        raise ConfigError(f"{what}: {f'{key}: ' if key else ''}{message}") from None
    except (ValueError, TypeError, NameError) as error:
        raise ConfigError(f"{what}: {error}") from None


def _escaped(value: Any) -> Any:
    """The value with every `${` escaped, so that OmegaConf takes it for text."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value) if "${" in value else value
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _site_files() -> list[Path]:
    named = os.environ.get(SITE_VARIABLE)
    if named is not None:
        if named and not os.path.exists(named):
            raise ConfigError(f"{SITE_VARIABLE}={named}: no such file; correct it, or unset it for none")
        return [Path(named)] if named else []
    for path in (Path(os.path.expanduser("~/.config/hpc/site.yaml")), Path("/etc/hpc/site.yaml")):
        if os.path.exists(path):
            return [path]
    return []


def _flag_layer(flags: Mapping[str, Any]) -> Branch:
    layer = Branch({}, yamltext.COMMAND_LINE)
    for dotted, value in flags.items():
        if value is not None:
            node = yamltext.from_value(value, layer.where)
            for part in reversed(dotted.split(".")):
                node = Branch({part: node}, layer.where)
            layer = _combined(layer, cast(Branch, node))
    return layer


def _entry(key: str, value: Any) -> Branch:
    where = yamltext.COMMAND_LINE
    if isinstance(value, list):
        items: list[yamltext.Node] = [yamltext.Scalar(text, False, where) for text in value]
        return Branch({key: yamltext.Sequence(items, where)}, where)
    return Branch({key: yamltext.Scalar(value, False, where)}, where)


def _combined(below: Branch, above: Branch) -> Branch:
    """Two trees of one place as one: groups joined, anything else of `above` taken."""
    entries = dict(below.entries)
    for key, node in above.entries.items():
        old = entries.get(key)
        entries[key] = _combined(old, node) if isinstance(old, Branch) and isinstance(node, Branch) else node
    return Branch(entries, below.where, below.key_where | above.key_where)


def _where(layers: list[Branch], key: str) -> str:
    for layer in reversed(layers):
        if key in layer.entries:
            return layer.entries[key].where
    return "the default"


def _origins(layers: list[Branch]) -> dict[str, str]:
    """Where each setting was written last, by dotted name."""
    origins: dict[str, str] = {}

    def visit(branch: Branch, prefix: str) -> None:
        for key, node in branch.entries.items():
            origins[prefix + key] = node.where
            if isinstance(node, Branch):
                visit(node, f"{prefix}{key}.")

    for layer in layers:
        visit(layer, "")
    return origins


def _with_origin(message: str, origins: Mapping[str, str]) -> str:
    """A refusal that a schema wrote ("train.epochs=0: ...") with the place where the value was written."""
    match = re.match(r"([\w.]+)=[^\s:(]*", message)
    place = origins.get(match[1]) if match else None
    return f"{match[0]} ({place}){message[match.end() :]}" if match and place else message


def _base_layer(path: Path) -> Branch:
    layer = yamltext.read_file(path)
    for key in _JOB_KEYS:
        if key in layer.entries:
            raise ConfigError(f"{layer.key_where[key]}: {key} cannot stand in a job's own base.yaml; leave it out")
    return layer


def _beside(schema: type, job: str) -> Mapping[str, Any]:
    types_of = fields.field_types(schema)
    for name in types_of:
        if name in fields.field_types(Config):
            raise ConfigError(
                f"{job}.config: Config.{name} has the name of the toolkit's own setting {name}; rename the job's"
            )
    return types_of


def _search_working_directory() -> None:
    """Let modules of the working directory be found first, as `python -m` does (console scripts do not).

    Not in a process that imports from a copy of the code and only works in that directory.
    """
    if WORKDIR_VARIABLE in os.environ:
        return
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    if not getattr(sys.flags, "safe_path", False) and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _job_schema(job: str, where: str) -> tuple[type, Path]:
    """The job's `Config` dataclass, and where its base.yaml would be."""
    _search_working_directory()
    if not all(part.isidentifier() for part in job.split(".")):
        raise _no_such_job(job, where)
    module_name = f"{job}.config"
    had_torch = "torch" in sys.modules
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise _broken(module_name, error) from None
        spec = None
    except Exception as error:
        raise _broken(job, error) from None
    if spec is None or spec.origin is None:
        raise _no_such_job(job, where)
    try:
        schema = getattr(importlib.import_module(module_name), "Config", None)
    except Exception as error:
        raise _broken(module_name, error) from None
    if "torch" in sys.modules and not had_torch:
        raise ConfigError(f"{module_name} imports torch; keep it in {job}.job, so that the login node can check values")
    if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
        raise ConfigError(f"{spec.origin}: needs a dataclass named Config with the job's parameters (it may be empty)")
    return schema, Path(spec.origin).with_name("base.yaml")


def _broken(module_name: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return ConfigError(f"cannot import {module_name}: {type(error).__name__}: {error}{place}")


def _no_such_job(job: str, where: str) -> ConfigError:
    names = job_names()
    bare = re.sub(r"[/\\]+", ".", job.strip("./\\ ")).removesuffix(".py")
    bare = bare if bare.startswith("jobs.") else f"jobs.{bare}"
    close = difflib.get_close_matches(bare, names, n=1)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(names) or 'none'}"
    return ConfigError(
        f"no training job {printable(job)} ({where}): needs a folder with config.py and job.py; {advice}"
    )
