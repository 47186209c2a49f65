"""A user's shell for the tests of the login node's door: a working directory, and a cluster of stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "tests" / "fake_slurm" / "bin"
TASKENV = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip
SCRIPT = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
print("REPORT", json.dumps([sys.argv[1:], os.getcwd(), {name: os.environ.get(name) for name in names}]), flush=True)
"""
AS_ROOT = ["--allow-root"] if os.geteuid() == 0 else []


class Shell:
    """A working directory of a user's, a cluster of stand-ins, and the door."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "my project"
        self.sent = folder / "sent"
        self.log = folder / "log"
        self.answers = folder / "answers"
        for path in (self.folder, self.sent, self.answers):
            path.mkdir()
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPC_"))}
        self.environ |= {
            "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HPC_SITE_CONFIG": "",
            "FAKE_SBATCH_FOLDER": str(self.sent),
            "FAKE_SLURM_LOG": str(self.log),
            "FAKE_SLURM_ANSWERS": str(self.answers),
        }
        (self.folder / "train.py").write_text(SCRIPT)

    def submit(self, *words: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        cut = words.index("--") if "--" in words else len(words)
        return subprocess.run(
            [sys.executable, "-m", "hpc.submit", *words[:cut], *words[cut:]],
            cwd=cwd or self.folder,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=90,
        )

    def send(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.submit(*AS_ROOT, *words, **environ)

    def calls(self, program: str) -> list[list[str]]:
        if not self.log.exists():
            return []
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [entry["argv"] for entry in entries if entry["program"] == program]

    def submissions(self) -> int:
        return len([argv for argv in self.calls("sbatch") if "--test-only" not in argv])

    def kept(self, name: str) -> str:
        (folder,) = self.sent.iterdir()
        return (folder / name).read_text(encoding="utf-8")

    def runs(self) -> list[Path]:
        root = self.folder / "runs"
        return sorted(root.iterdir()) if root.exists() else []

    def says(self, program: str, stdout: str = "", *, stderr: str = "", code: int = 0) -> None:
        (self.answers / program).write_text(stdout)
        (self.answers / f"{program}.err").write_text(stderr)
        (self.answers / f"{program}.exit").write_text(str(code))


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): os.lstat(path).st_mtime_ns for path in folder.rglob("*")}
