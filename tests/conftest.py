"""Fixtures: a working directory with jobs/ of its own and no site file; real ranks of the training core."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from must_run import (  # noqa: F401
    pytest_collectreport,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from rank_server import Ranks

ROOT = Path(__file__).resolve().parent.parent
WriteJob = Callable[..., str]
ALL_TYPES = """
from __future__ import annotations
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclass
class Optim:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)

@dataclass
class Config:
    text: str = "a"
    maybe: str | None = None
    anything: Any = None
    count: int = 1
    flag: bool = False
    rate: float = 0.5
    maybe_rate: float | None = None
    either: int | str = 1
    path: Path = Path("data")
    colour: Colour = Colour.RED
    many: list[str] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=dict)
    bag: dict[str, Any] = field(default_factory=dict)
    optim: Optim = field(default_factory=Optim)
"""


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the toolkit remembers of a user's nodes is kept apart: tests neither read nor write it."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def nobody_elses_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No site file, a working directory of its own, and no job left in sys.modules."""
    monkeypatch.setenv("HPC_SITE_CONFIG", "")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("jobs.made")]:
        del sys.modules[name]


_numbers = itertools.count()


@pytest.fixture
def write_job(nobody_elses_settings: None, tmp_path: Path) -> WriteJob:
    """Writes jobs/<name>/config.py (and base.yaml) in the working directory; returns "jobs.<name>"."""

    def write(source: str = "", base: str | None = None, **files: str) -> str:
        name = f"made{next(_numbers)}"
        folder = tmp_path / "jobs" / name
        folder.mkdir(parents=True)
        head = "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    pass\n"
        (folder / "config.py").write_text(source or head, encoding="utf-8")
        (folder / "__init__.py").write_text("")
        if base is not None:
            (folder / "base.yaml").write_text(base, encoding="utf-8")
        return f"jobs.{name}"

    return write


@pytest.fixture
def all_types(write_job: WriteJob) -> str:
    return write_job(ALL_TYPES)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts real ranks of hpc.train, a fraction of a second each; the first use takes a few seconds."""
    server = Ranks()
    yield server
    server.close()
