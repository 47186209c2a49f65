"""What a checkpoint was made with, and what of it is different now: settings of the training, code, versions."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hpc import yamltext
from hpc.errors import ConfigError
from hpc.train.job import TrainingJob

ELSEWHERE = ("name", "command", "run_root", "run_dir", "slurm", "launch")
"""Settings that say where and how a run is started, not what it trains."""


def origin(job: TrainingJob) -> dict[str, Any]:
    """The versions, and a digest of each source file of the training job's package and of the training core."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {"versions": versions, "code": _digests(type(job).__module__) | _digests(__name__)}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs of two origins, one line each; nothing where a checkpoint does not say."""
    lines = [
        f"{name}: {then['versions'].get(name)} -> {version}"
        for name, version in now["versions"].items()
        if "versions" in then and then["versions"].get(name) != version
    ]
    before, after = then.get("code", now["code"]), now["code"]
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            what = "is new" if name not in before else "is gone" if name not in after else "has changed"
            lines.append(f"code: {name} {what}")
    return lines


def other_settings(then: str, now: str) -> list[str]:
    """The settings of the training and of its job that differ between two configurations, as "key: old -> new"."""
    if not then or not now:
        return []
    try:
        before, after = dict(_settings(then)), dict(_settings(now))
    except ConfigError as error:
        return [f"the configuration in the checkpoint cannot be read: {error}"]
    return [
        f"{key}: {before.get(key, 'not there')} -> {after.get(key, 'not there')}"
        for key in before | after
        if before.get(key) != after.get(key)
    ]


def _settings(text: str) -> Iterator[tuple[str, str]]:
    tree = yamltext.read_text(text, "config.yaml")
    for key, node in tree.entries.items():
        if key not in ELSEWHERE:
            yield from _leaves(key, node)


def _leaves(key: str, node: yamltext.Node) -> Iterator[tuple[str, str]]:
    if isinstance(node, yamltext.Branch) and node.entries:
        for name, inner in node.entries.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, _text(node)


def _text(node: yamltext.Node) -> str:
    if isinstance(node, yamltext.Scalar):
        return node.text
    if isinstance(node, yamltext.Sequence):
        return f"[{', '.join(map(_text, node.items))}]"
    return "{" + ", ".join(f"{key}: {_text(inner)}" for key, inner in node.entries.items()) + "}"


def _digests(module: str) -> dict[str, str]:
    """Each source file beside a module, as "jobs/digits/job.py", with the first half of its SHA-256."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return {}
    package = module.rpartition(".")[0].replace(".", "/")
    found = {}
    for path in sorted(Path(file).parent.glob("*.py") if package else [Path(file)]):
        try:
            found[f"{package}/{path.name}".lstrip("/")] = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        except OSError:
            continue  # it went away while we looked
    return found
