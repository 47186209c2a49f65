"""The walls: where a line runs decides where it lives, and what it may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("login", "allocation", "node", "train", "slurm")
MAY_IMPORT = {
    "login": {"slurm"},
    "allocation": {"slurm"},
    "node": {"slurm"},
    "train": {"node"},  # the door alone, to hand over to the agent in a task without a rank
    "slurm": set(),
    "ground": set(),
}
NAMES_SLURM = (
    "node/environment.py",
    "node/__main__.py",
    "node/placement.py",
    "allocation/",
    "login/",
    "slurm/",
    "launch.py",
)


def modules() -> list[Path]:
    return sorted((ROOT / "hpc").rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT / "hpc").parts
    return parts[0] if len(parts) > 1 else "ground"


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_crosses_a_wall(path: Path) -> None:
    mine = room(path)
    is_door = mine == "ground" and "def main(" in path.read_text(encoding="utf-8")
    for name in imports(path):
        match = re.match(r"hpc\.(\w+)", name)
        if match and match[1] in ROOMS and match[1] != mine and not is_door:
            assert match[1] in MAY_IMPORT[mine], f"{path.name} imports {name}"
    if mine == "train" and path.name != "__main__.py":
        assert not any(name.startswith("hpc.node") for name in imports(path))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_is_imported_at_the_top_only_in_workers(path: Path) -> None:
    if room(path) != "train":
        assert not any(name.split(".")[0] == "torch" for name in imports(path, top_level_only=True))


def test_a_jobs_parameters_need_no_torch_and_jobs_is_no_package() -> None:
    for path in (ROOT / "jobs").glob("*/config.py"):
        assert not any(name.split(".")[0] == "torch" for name in imports(path))
    assert not (ROOT / "jobs" / "__init__.py").exists()


def test_slurms_variables_are_named_only_where_they_are_read() -> None:
    for path in [*modules(), *(ROOT / "jobs").rglob("*.py")]:
        if re.search(r"[\"']SLURM_[A-Z]", path.read_text(encoding="utf-8")):
            assert str(path.relative_to(ROOT / "hpc")).startswith(NAMES_SLURM), path


@pytest.mark.parametrize("folder", ["hpc", "jobs", "sbin"])
def test_s2_no_shell_anywhere(folder: str) -> None:
    """Text that reaches a shell is text that can run: every program is started by its arguments."""
    texts = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in texts:
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not re.search(r"shell\s*=\s*True|os\.system|getoutput|os\.popen", text), path


def test_the_top_level_is_as_agreed() -> None:
    git = subprocess.run(["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = {line.split("/")[0].strip('"') for line in git.stdout.splitlines()}
    agreed = {"pyproject.toml", "hpc", "jobs", "sbin", "tests", "README.md", "LICENSE", "CHANGELOG.md"}
    assert {name for name in names if not name.startswith(".")} <= agreed


def test_no_room_for_odds_and_ends() -> None:
    bad = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert not [
        path
        for folder in ("hpc", "jobs", "sbin", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem in bad
    ]


def loaded_by(code: list[str]) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }


def test_help_is_quick_because_it_loads_nothing() -> None:
    assert not loaded_by(["-m", "hpc.submit", "--help"]) & {"torch", "omegaconf", "submitit", "yaml"}


def test_login_node_and_batch_step_never_load_torch() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in modules()
        if room(path) in ("login", "allocation", "slurm", "ground") and path.name not in ("__init__.py", "__main__.py")
    ]
    assert "torch" not in loaded_by(["-c", "; ".join(f"import {name}" for name in names)])
