"""The two commands of the set-up, and the check, on machines that lack something: one line says what, and what to do.

A stand-in for Python records how it is called: nothing is installed here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """\
#!/bin/bash
echo "$*" >>"$CALLS"
case $* in
*version_info*) [ "$LACKS" != 3.10 ] ;;
--version) echo 'Python 3.9.2' ;;
*ensurepip*) [ "$LACKS" != venv ] ;;
'-m venv --clear '*) mkdir -p "${*:4}/bin" && cp "$0" "${*:4}/bin/python" ;;
'-c import torch') [ -e "$CALLS.torch" ] ;;
*' torch==2.13.0') [ "$LACKS" != wheel ] && [ "$LACKS" != index ] && : >"$CALLS.torch" ;;
*' torch>=2.8') [ "$LACKS" != index ] || { echo 'No matching distribution' >&2; exit 1; }; : >"$CALLS.torch" ;;
*'pytest -q -n auto'*) [ "$LACKS" != mercy ] ;;
esac
"""


class Machine:
    """A clone with the scripts alone, and a PATH on which the stand-ins come first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone, self.bin = folder, folder / "my clone", folder / "bin"
        shutil.copytree(ROOT / "sbin", self.clone / "sbin")
        shutil.copy(ROOT / "pyproject.toml", self.clone)
        self.bin.mkdir()
        self.program("python3", PYTHON)
        self.program("id", "#!/bin/sh\necho 1000\n")
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, lacks: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "LACKS": lacks,
            **environ,
        }
        argv = [str(self.clone / "sbin" / words[0]), *words[1:]]
        return subprocess.run(argv, env=env, cwd=self.folder, capture_output=True, text=True, timeout=30)

    def calls(self) -> list[str]:
        """How Python was called since the last time."""
        file = self.folder / "calls"
        calls = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", ["quickstart", "test", "check"])
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HPC_PYTHON": "python9"}, "error: there is no python9 on PATH; install Python 3.10 or newer"),
        (
            {"lacks": "3.10"},
            "error: python3 is Python 3.9.2; Python 3.10 or newer is needed, name it with HPC_PYTHON=...",
        ),
        ({"lacks": "venv"}, "(Debian, Ubuntu: python3-venv)"),
        ({"lacks": "index"}, "error: pip could not install torch>=2.8; its words stand above"),
    ],
)
def test_what_is_missing_is_said_in_one_line(machine: Machine, script: str, environ: dict[str, str], said: str) -> None:
    done = machine.run(script, **environ)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr.splitlines()[-1] and done.stderr.startswith(("No matching", f"{script}: error"))
    assert not [call for call in machine.calls() if call.startswith(("-m hpc.submit", "-m pytest"))]


@pytest.mark.parametrize(
    ("lacks", "gpu", "installed"),
    [("", False, ["torch==2.13.0"]), ("wheel", False, ["torch==2.13.0", "torch>=2.8"]), ("", True, ["torch>=2.8"])],
)
def test_the_release_of_torch(machine: Machine, lacks: str, gpu: bool, installed: list[str]) -> None:
    if gpu:
        machine.program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA'\n")
    done = machine.run("quickstart", lacks=lacks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [call.split()[-1] for call in machine.calls() if "torch" in call and "install" in call] == installed


def test_a_second_time_installs_nothing_and_a_larger_set_is_enough(machine: Machine) -> None:
    def installs(script: str) -> list[str]:
        machine.run(script)
        return [call.split()[-1] for call in machine.calls() if "pip install" in call]

    assert installs("quickstart") == ["torch==2.13.0", "."]
    assert installs("quickstart") == []
    assert installs("check") == [".[dev]"]
    assert installs("test") == installs("quickstart") == []
    with (machine.clone / "pyproject.toml").open("a") as stream:
        stream.write("# another dependency\n")
    assert installs("test") == [".[test]"]


def test_quickstart_trains_and_says_what_is_next(machine: Machine) -> None:
    done = machine.run("quickstart", "train.epochs=1")
    assert machine.calls()[-1] == "-m hpc.submit --local --name quickstart train.epochs=1"
    last = done.stdout.splitlines()[-1]
    assert "hpc.submit --nodes 2 --gpus-per-node 4" in last and "--dry-run" in last and "sbin/devcluster up" in last


@pytest.mark.parametrize("lacks", ["", "mercy"])
def test_without_root_the_real_slurm_is_left_out_and_that_is_said(machine: Machine, lacks: str) -> None:
    done = machine.run("test", lacks=lacks)
    (pytest_call,) = [call for call in machine.calls() if call.startswith("-m pytest")]
    assert pytest_call.endswith("-m not cluster")
    assert done.returncode == (1 if lacks else 0)
    last = (done.stderr if lacks else done.stdout).splitlines()[-1]
    assert "left out: they need root on Debian or Ubuntu" in last and ("all tests passed" in last) is (not lacks)


def test_arguments_go_to_pytest_as_they_are(machine: Machine) -> None:
    machine.run("test", "tests/test_config.py", "-k", "typo or blank")
    assert machine.calls()[-1] == "-m pytest tests/test_config.py -k typo or blank"
