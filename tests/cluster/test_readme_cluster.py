"""The README's blocks for a cluster, run on the real Slurm as its reader would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import FIRST_USER, Rig, give_to

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_readme import Block, blocks_to_run, compare, write_files, write_programs


@pytest.fixture
def clone(cluster: Rig) -> Iterator[Path]:
    """The reader's clone, in the ordinary user's home, its virtual environment activated on PATH."""
    assert cluster.clone is not None
    folder = cluster.home() / f"readme-{time.time_ns()}"
    shutil.copytree(cluster.clone, folder)
    write_files(folder)
    write_programs(folder / ".venv" / "bin", cluster.python)
    give_to(folder, FIRST_USER)
    yield folder
    cluster.cancel_jobs()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("block", [pytest.param(b, id=f"line-{b.line}") for b in blocks_to_run("cluster")])
def test_a_block_for_a_cluster(cluster: Rig, clone: Path, block: Block) -> None:
    def here(text: str) -> str:
        """With the node names of this cluster, which need not be the number 0 of the README."""
        return re.sub(r"\bnode(?=\d)", cluster.node_names[0].removesuffix("1"), text)

    path = f"{clone / '.venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    argv = ["bash", "-eu", "-c", f"exec 2>&1\n{here(block.script)}"]
    if "root" in block.words:
        environ = {
            **os.environ,
            "HPC_DEVCLUSTER_NUMBER": str(cluster.number),
            "HPC_DEVCLUSTER_VENV": str(clone / ".venv"),
        }
        done = subprocess.run(argv, cwd=clone, env=environ, stdout=subprocess.PIPE, text=True, timeout=300)
    else:
        done = cluster.run(argv, cwd=clone, env={"PATH": path, "HPC_SITE_CONFIG": ""}, timeout=300)
    for job_id in re.findall(r"^(?:job|Submitted batch job) (\d+)", done.stdout, re.MULTILINE):
        cluster.track(job_id)
    assert done.returncode == block.exit_code, done.stdout
    compare([here(line) for line in block.shown], done.stdout)
