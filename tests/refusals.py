"""What the tests of the configuration say again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc.config import load
from hpc.errors import ConfigError


def yaml_file(text: str, name: str = "a.yaml") -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def refusal(**given_: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**given_)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)
