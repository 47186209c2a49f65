"""What the README shows is what happens: its blocks are run, and the lines that it shows are compared.

Above each block of commands stands a mark: `<!-- run: local -->` runs it here in a copy of the project, `sbatch` being a
stand-in; `local slow`; `cluster` and `cluster root` run on the real Slurm (tests/cluster/test_readme_cluster.py);
`exit=N` is the exit code of the last command (else 0); `<!-- not run: why -->`; `<!-- file: PATH -->` is a file that
the other blocks need. A block of plain text is ```text and has no mark.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests" / "fake_slurm" / "bin"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLACE = "/home/you/toolkit"
"""Where the reader's clone is, in the README."""
_ANY = (  # what differs from run to run: shown as it was, printed as it is
    (r"\d{8}-\d{6}-[0-9a-f]{4}", r"\d{8}-\d{6}-[0-9a-f]{4}"),
    (re.escape(PLACE), r"\S*?"),
    (r"(?<=job )\d+|(?<=slurm-)\d+|(?<=scancel )\d+|(?<=train-)\d+|(?<=MASTER_PORT=)\d+|(?<=RUN_ID=)\d+", r"\d+"),
    (r"\d+ min(?: \d+ s)?|\d+\.\d+ s", r"(?:\d+ h )?(?:\d+ min)?(?: ?[\d.]+ s)?"),
    (r"\d+(?= samples/s)", r"\d+"),
    (r"\d+\.\d+", r"\d+\.\d+"),
    (r"\.\.\.", r".*"),
)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    mark: str
    text: str

    @property
    def words(self) -> list[str]:
        """Of "run: cluster root exit=2": cluster, root, exit=2; empty for a block that is not run."""
        return self.mark.removeprefix("run:").split() if self.mark.startswith("run:") else []

    @property
    def exit_code(self) -> int:
        return next((int(word[5:]) for word in self.words if word.startswith("exit=")), 0)

    @property
    def script(self) -> str:
        """The commands alone: the lines after a prompt, with those that continue them."""
        if self.language != "console":
            return self.text
        commands: list[str] = []
        for line in self.text.splitlines():
            if line.startswith(("$ ", "# ")):
                commands.append(line[2:])
            elif commands and commands[-1].endswith("\\"):
                commands.append(line)
        return "\n".join(commands) + "\n"

    @property
    def shown(self) -> list[str]:
        """The lines of output."""
        lines, continued = [], False
        for line in self.text.splitlines() if self.language == "console" else []:
            command = continued or line.startswith(("$ ", "# "))
            continued = command and line.endswith("\\")
            if not command and line.strip() not in ("", "..."):
                lines.append(line)
        return lines


def blocks() -> list[Block]:
    found = []
    lines = README.splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = re.fullmatch(r"<!-- (.*) -->", lines[start - 1])
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(start + 1, lines[start][3:], mark[1] if mark else "", text))
        start = None
    return found


def blocks_to_run(place: str) -> list[Block]:
    return [block for block in blocks() if place in block.words]


def write_files(folder: Path) -> None:
    """The files that the README shows, where it says."""
    for block in blocks():
        if block.mark.startswith("file: "):
            path = folder / block.mark.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def write_programs(folder: Path, python: str) -> None:
    """What activating the virtual environment puts on PATH."""
    folder.mkdir(parents=True)
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} {words}"$@"\n')
        (folder / name).chmod(0o755)


def compare(shown: list[str], printed: str) -> None:
    """Every shown line is printed, in this order; other lines may stand between them."""
    rest = printed.splitlines()
    for line in shown:
        wanted = re.compile(_pattern(line))
        at = next((number for number, text in enumerate(rest) if wanted.fullmatch(text.rstrip())), None)
        assert at is not None, f"not printed, or not in this order: {line!r}\n{printed}"
        rest = rest[at + 1 :]


def _pattern(line: str) -> str:
    for shown, printed in _ANY:
        found = re.search(shown, line)
        if found:
            return _pattern(line[: found.start()]) + printed + _pattern(line[found.end() :])
    return re.escape(line)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"line-{block.line}", marks=[pytest.mark.slow] if "slow" in block.words else [])
        for block in blocks_to_run("local")
    ],
)
def test_a_block_for_this_machine(block: Block, tmp_path: Path) -> None:
    clone, home = tmp_path / "toolkit", tmp_path / "home"
    clone.mkdir()
    for name in ("hpc", "jobs", "sbin"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    write_files(clone)
    write_programs(tmp_path / "bin", sys.executable)
    site = home / ".config" / "hpc" / "site.yaml"
    site.parent.mkdir(parents=True)
    site.write_text(f"slurm: {{allow_root: {'true' if os.geteuid() == 0 else 'false'}}}\n")
    kept = {name: os.environ[name] for name in ("OPENBLAS_CORETYPE", "LANG") if name in os.environ}
    path = f"{tmp_path / 'bin'}:{STUBS}:/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-eu", "-c", block.script],
        env={**kept, "PATH": path, "HOME": str(home)},
        cwd=clone,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert done.returncode == block.exit_code, done.stdout
    compare(block.shown, done.stdout)


def test_every_block_says_whether_it_is_run() -> None:
    for block in blocks():
        if block.language == "text":
            assert not block.mark, f"line {block.line}: plain text is not run"
            continue
        kind, _, rest = block.mark.partition(": ")
        assert kind in ("run", "not run", "file") and rest, f"line {block.line} of README.md: a mark is missing"
        if kind == "run":
            known = re.fullmatch(r"(local( slow)?|cluster( root)?)( exit=\d+)?", rest)
            assert known and block.script.strip(), f"line {block.line}: <!-- {block.mark} --> runs nothing"


def test_lines_are_compared_with_care() -> None:
    compare(
        ["job 178 submitted: x", "...", "a 7.5 ...", f"tail {PLACE}/r"], "job 9 submitted: x\n\na 0.25 b\ntail /x/r\n"
    )
    for shown, printed in (("8 ranks", "4 ranks"), ("accuracy", "accuracy 1"), ("a.b", "axb"), ("exit 2", "exit 1")):
        with pytest.raises(AssertionError, match="not printed"):
            compare([shown], printed)
    with pytest.raises(AssertionError, match="in this order"):
        compare(["b", "a"], "a\nb\n")


def test_the_first_screen_has_the_set_up_and_a_session() -> None:
    first = "\n".join(README.splitlines()[:40])
    for needed in ("sbin/quickstart", "sbin/test", "$ python -m hpc.submit", "ended: COMPLETED"):
        assert needed in first


def test_what_it_names_is_there() -> None:
    written = {block.mark.removeprefix("file: ") for block in blocks() if block.mark.startswith("file: ")}
    for name in set(re.findall(r"(?<![\w/.])(?:sbin|hpc|jobs|tests)/[\w./-]*\w\b", README)) - written:
        assert (ROOT / name).exists() or any(path.startswith(name) for path in written), name
    for module in set(re.findall(r"-m (hpc\.\w+|jobs\.[\w.]+)", README)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_settings_that_it_names_exist() -> None:
    from hpc.config import load

    known = load(site=False).to_yaml()
    for section, key in set(re.findall(r"\b(slurm|launch|train)\.([a-z_]+)\b", README)) - {("train", "py")}:
        text = known.partition(f"\n{section}:\n")[2]
        assert re.search(rf"^  {key}:", re.split(r"^\w", text, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE) or (
            f"hpc.{section}.{key}" in README or f"hpc/{section}/{key}" in README
        ), f"{section}.{key}"


def test_exit_codes_are_those_of_the_code() -> None:
    from hpc import exitcodes

    table = README.split("## Exit codes")[1].split("##")[0]
    shown = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert shown == {value for name, value in vars(exitcodes).items() if name.isupper() and isinstance(value, int)}
