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


def session(folder: Path, source: str, must_run: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a test file of this source and one that passes."""
    (folder / "test_made.py").write_text(source)
    (folder / "test_well.py").write_text("def test_c():\n    pass\n")
    argv = [sys.executable, "-m", "pytest", "-p", "must_run", "-p", "no:cacheprovider", "--rootdir=.", *words]
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(TESTS), "HPC_TESTS_MUST_RUN": must_run, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.slow  # sessions of pytest in themselves
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
    done = session(tmp_path, source, must_run)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert ("skipped although every test must run here" in done.stdout) is named
    assert ("test_made.py" in done.stdout.partition("every test must run here")[2]) is named


@pytest.mark.slow
@pytest.mark.parametrize("source", [SKIPPED.format("no scontrol here"), WHOLE_FILE])
def test_on_all_cores_too(tmp_path: Path, source: str) -> None:
    done = session(tmp_path, source, "yes", "-p", "xdist.plugin", "-n", "2")
    assert done.returncode == 1 and "test_made.py" in done.stdout.partition("every test must run here")[2], done.stdout
