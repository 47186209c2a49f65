"""What the README shows is what happens: its marked sessions are run, and their lines compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests" / "fake_slurm" / "bin"


def sessions(kind: str) -> list[tuple[str, list[str]]]:
    """(command, shown lines) of each console block that follows the mark."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"<!-- run: {kind} -->\n```console\n(.*?)```", text, re.DOTALL)
    found = []
    for block in blocks:
        command, *lines = block.splitlines()
        assert command.startswith("$ ")
        found.append((command[2:], lines))
    return found


def pattern(line: str) -> re.Pattern[str]:
    """A shown line as what must be printed: "..." stands for anything, a number for any number, an id for any id."""
    line = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN", line)
    parts = re.split(r"(\.\.\.|RUN|/home/\w+|\d+(?:\.\d+)?)", line)
    as_pattern = {"...": ".*", "RUN": r"\d{8}-\d{6}-[0-9a-f]{4}"}
    whole = ""
    for part in parts:
        if part in as_pattern:
            whole += as_pattern[part]
        elif part.startswith("/home/"):
            whole += ".*"
        elif re.fullmatch(r"\d+(?:\.\d+)?", part):
            whole += r"\d+(?:\.\d+)?"
        else:
            whole += re.escape(part)
    return re.compile(whole)


def check(lines: list[str], printed: str) -> None:
    """Every shown line is printed, in this order."""
    rest = printed.splitlines()
    for line in lines:
        if line == "...":
            continue
        at = next((n for n, text in enumerate(rest) if pattern(line).fullmatch(text)), None)
        assert at is not None, f"not printed: {line!r}\n{printed}"
        rest = rest[at + 1 :]


@pytest.mark.parametrize(("command", "lines"), sessions("local"))
def test_local_sessions(command: str, lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    kept = {name: os.environ[name] for name in ("HOME", "OPENBLAS_CORETYPE") if name in os.environ}
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    script = folder / "python"
    script.unlink()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", command],
        env={**kept, "PATH": f"{folder}:{STUBS}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": ""},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    check(lines, done.stdout)
    assert done.returncode == (2 if "error:" in "".join(lines) else 0)


def test_the_first_screen_has_the_set_up_and_a_session() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:35]
    text = "\n".join(first)
    for needed in ("sbin/quickstart", "sbin/test", "$ python -m hpc.submit", "ended: COMPLETED"):
        assert needed in text
    assert len(sessions("local")) >= 3 and len(sessions("cluster")) >= 1


def test_what_it_names_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"\b(?:sbin|hpc|jobs)/[\w./-]*\w\b", text)):
        if name in ("jobs/name", "hpc/site.yaml"):
            continue
        assert (ROOT / name).exists(), name
    for module in set(re.findall(r"-m (hpc\.\w+|jobs\.[\w.]+)", text)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_exit_codes_are_those_of_the_code() -> None:
    from hpc import exitcodes

    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Exit codes")[1].split("##")[0]
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    codes = {exitcodes.DONE, exitcodes.USAGE, exitcodes.UNAVAILABLE, exitcodes.WANTS_ANOTHER_ATTEMPT}
    assert shown == codes | {exitcodes.BAD_ENVIRONMENT}
