"""hpc.clean at a terminal: what --end asks, which answers end something, and that --job leaves other jobs' leftovers alone."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from steps import ROOT

NODE, JOB, OTHER = f"door{os.getpid()}", "100", "101"
SLURM = {
    "squeue": "#!/bin/sh\n",
    "scontrol": "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n",
}
HERE = {"SLURMD_NODENAME": NODE, "SLURM_CLUSTER_NAME": "here"}


@pytest.fixture
def left(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes] | Path]]:
    """A process and a folder of a job that is over, and the same of another one."""
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    found: dict[str, subprocess.Popen[bytes] | Path] = {}
    for job in (JOB, OTHER):
        environ = {**HERE, "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
        found[f"process {job}"] = subprocess.Popen(["sleep", "600"], env=environ, start_new_session=True)
        prefix = f"hpc-{os.getuid()}-here.{job}.0.0-"
        found[f"folder {job}"] = Path(tempfile.mkdtemp(prefix=prefix, dir=tmp_path))
    yield found
    for one in found.values():
        if isinstance(one, subprocess.Popen):
            one.kill()
            one.wait()


def at_a_terminal(tmp_path: Path, typed: bytes, *words: str) -> tuple[int, str]:
    """The door at a terminal of its own, where this is typed at its question; its exit code and what was on the screen."""
    environ = {**HERE, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environ |= {"TMPDIR": str(tmp_path), "TERM": "dumb"}
    words = ("-m", "hpc.clean", *words, *(("--as-root",) if os.getuid() == 0 else ()))
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
        os.execve(sys.executable, [sys.executable, *words], environ)
    screen, answered, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 4096)
        except OSError:  # EIO: nobody has the terminal any more
            break
        if not data:
            break
        screen += data
        if not answered and b"[y/N] " in screen:
            answered = True
            os.write(terminal, typed)
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), screen.decode(errors="replace")


def living(left: dict[str, subprocess.Popen[bytes] | Path]) -> list[str]:
    return [name for name, one in left.items() if (one.exists() if isinstance(one, Path) else one.poll() is None)]


@pytest.mark.slow
def test_only_a_typed_yes_ends_and_only_what_the_job_has_left(
    tmp_path: Path, left: dict[str, subprocess.Popen[bytes] | Path]
) -> None:
    everything = list(left)
    for typed in (b"no\n", b"\n", b"yesterday\n", b"\x04", b"\x03"):  # ... the end of input, Ctrl-C
        code, screen = at_a_terminal(tmp_path, typed, "--end", "--job", JOB)
        assert code == 1 and "end 1 processes, remove 1 files? [y/N]" in screen, screen
        assert "nothing was ended" in screen and living(left) == everything, screen
        assert f"job {OTHER}" not in screen
    code, screen = at_a_terminal(tmp_path, b"Yes\n", "--end", "--job", JOB)
    assert code == 0 and "1 processes ended, 1 files removed" in screen, screen
    assert living(left) == [f"process {OTHER}", f"folder {OTHER}"]
    code, screen = at_a_terminal(tmp_path, b"", "--end", "--job", JOB)  # clean: there is nothing to ask
    assert code == 0 and "[y/N]" not in screen and screen.rstrip().endswith(f"{NODE}: clean"), screen
