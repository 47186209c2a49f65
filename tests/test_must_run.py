"""The promise of sbin/test as root: a test that is left out fails the run, and is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SKIPPED = "import pytest\ndef test_a():\n    pytest.skip('{}')\ndef test_b():\n    pass\n"
WHOLE_FILE = "import pytest\npytest.skip('no scontrol here', allow_module_level=True)\n"


@pytest.mark.slow  # five sessions of pytest
@pytest.mark.parametrize(
    ("source", "must_run", "exit_code", "named"),
    [
        (SKIPPED.format("no scontrol here"), "yes", 1, True),
        (SKIPPED.format("no scontrol here"), "", 0, False),
        (SKIPPED.format("needs a GPU"), "yes", 0, False),
        (WHOLE_FILE, "yes", 1, True),
        ("import pytest\n@pytest.mark.xfail(strict=True)\ndef test_a():\n    assert 0\n", "yes", 0, False),
    ],
)
def test_a_skipped_test_fails_the_session(
    tmp_path: Path, source: str, must_run: str, exit_code: int, named: bool
) -> None:
    (tmp_path / "test_made.py").write_text(source)
    (tmp_path / "test_well.py").write_text("def test_c():\n    pass\n")
    argv = [sys.executable, "-m", "pytest", "-p", "must_run", "-p", "no:cacheprovider", "--rootdir=."]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "HPC_TESTS_MUST_RUN": must_run}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert ("skipped although every test must run here" in done.stdout) is named
    assert ("test_made.py" in done.stdout.partition("every test must run here")[2]) is named
