"""GPU memory before a start, and files of the dead, with the real NVML bindings on a driver library made for the test."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from steps import ROOT

from hpc.node import processes, residue, sentinel
from hpc.node.residue import Folder

WAIT = """
import json, sys
from hpc.node import gpus, tidy
tidy.LOOK_S = 0.05
notes = []
tidy.wait_for_gpus(json.loads(sys.argv[1]), notes.append, limit_s=float(sys.argv[2]))
print(json.dumps(notes))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: the driver's library is a small one of this test's own")
    folder = tmp_path_factory.mktemp("nvml")
    argv = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(ROOT / "tests" / "fake_nvml.c")]
    subprocess.run(argv, check=True)
    return folder


def waited(driver: Path, tmp_path: Path, lines: list[str], *names: str, limit_s: float = 0.3) -> list[str]:
    """What an agent says that has these GPUs."""
    (tmp_path / "gpus").write_text("\n".join(lines) + "\n")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(driver)}
    env |= {"FAKE_NVML": str(tmp_path / "gpus"), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n", "SLURM_STEP_ID": "0"}
    done = subprocess.run(
        [sys.executable, "-c", WAIT, json.dumps(names), str(limit_s)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_who_holds_a_gpu_is_waited_for_and_named(driver: Path, tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n", "SLURM_STEP_ID": "0"}
    sibling = subprocess.Popen(["sleep", "60"], env=environ, executable="/bin/sleep")
    old = subprocess.Popen(["sleep", "60"], env={**environ, "SLURM_JOB_ID": "6"}, executable="/bin/sleep")
    try:
        assert waited(driver, tmp_path, ["4", f"4000 {sibling.pid}:4000", "9000 1:9000"], "0", "1") == []
        waiting, warning = waited(driver, tmp_path, [f"70000 {old.pid}:70000", "2048", "4"], "0", "1", "2")
        assert waiting.startswith("waiting for GPU memory: GPU 0 is held by")
        assert f"pid {old.pid} of yours (70000 MiB, job 6)" in warning
        assert "GPU 1 has 2048 MiB in use by no process" in warning and "GPU 2" not in warning
        (warning,) = waited(driver, tmp_path, ["500 4999999:500"], "0", limit_s=0)
        assert "pid 4999999 (500 MiB; not visible from here)" in warning
    finally:
        for process in (sibling, old):
            process.kill()
            process.wait()


def test_without_a_driver_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    assert waited(tmp_path, tmp_path, ["70000 1:70000"], "0", limit_s=30) == []


# ---- files of the dead -----------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A /dev/shm and a folder for temporary files of this test's own."""
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(residue, "SHM", shm)
    monkeypatch.setattr(residue, "folders", lambda: [temporary])
    return shm, temporary


def test_only_files_of_the_dead_are_residue(places: tuple[Path, Path]) -> None:
    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        pytest.skip("needs the machine's own process numbers")
    shm, temporary = places
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine = Folder(cluster="c", job_id="5", restarts=1, start=0)
    gone = [shm / f"torch_{dead.pid}_123_0", shm / "nccl-aB12cD", shm / "sem.mp-x1", shm / "__KMP_REGISTERED_LIB_1_0"]
    gone[3] = shm / f"__KMP_REGISTERED_LIB_{dead.pid}_0"
    kept = [shm / f"torch_{os.getpid()}_123_0", shm / "nccl-open00", shm / "somebodys-data", shm / "psm_linked"]
    for path in (*gone, *kept[:3]):
        path.write_text("x")
    kept[3].symlink_to("/etc/passwd")
    folders = [temporary / "pymp-abcdefgh", Path(tempfile.mkdtemp(prefix=mine.prefix, dir=temporary))]
    folders[0].mkdir()
    (folders[0] / "inside").write_text("x")
    spared = [Path(tempfile.mkdtemp(prefix=mine.prefix.replace(".5.1", ".5.2"), dir=temporary)), temporary / "my work"]
    spared[1].mkdir()
    notes: list[str] = []
    with open(kept[1]):  # somebody has it open
        found = residue.find([], lambda folder: folder == mine, notes.append)
        assert {one.path for one in found} == {*gone, *folders} and not notes
        assert all(map(residue.remove, found)) and all(map(residue.remove, found))  # twice is harmless
    assert not any(path.exists() for path in (*gone, *folders))
    assert all(os.path.lexists(path) for path in (*kept, *spared))


def test_what_a_living_process_may_come_back_to_is_kept(places: tuple[Path, Path]) -> None:
    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        pytest.skip("needs the machine's own process numbers")
    shm, _ = places
    time.sleep(0.05)
    (shm / "nccl-aB12cD").write_text("x")
    me = processes.look_at(os.getpid())
    assert me is not None
    assert residue.find([me], lambda _: False, print) == []
    assert [one.path.name for one in residue.find([], lambda _: False, print)] == ["nccl-aB12cD"]


def test_a_kernel_that_cannot_answer_tells_nobody_dead(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a memory cgroup at its limit: no answer about a process is not taken for its death."""
    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        pytest.skip("needs the machine's own process numbers")
    me = processes.look_at(os.getpid())
    assert me is not None
    folder = places[1] / f"{residue.agents_prefix(me)}abcdefgh"
    folder.mkdir()
    assert residue.find([], lambda _: False, print) == []
    read = Path.read_text

    def starved(path: Path, *arguments: str | None, **more: str | None) -> str:
        if path.name == "stat" and path.parts[1] == "proc":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return read(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_text", starved)
    with pytest.raises(processes.Starved):
        residue.find([], lambda _: False, print)
    notes: list[str] = []
    sentinel.remove_residue(notes.append)
    assert folder.exists() and "are left where they are" in notes[0]
    monkeypatch.undo()


def test_a_clock_that_is_set_forward_makes_no_living_process_another_one(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC:
        pytest.skip("needs the machine's own process numbers")
    shm, temporary = places
    me = processes.look_at(os.getpid())
    assert me is not None
    living = temporary / f"{residue.agents_prefix(me)}abcdefgh"
    before = temporary / f"{residue.agents_prefix(replace(me, started=me.started - 100))}abcdefgh"  # of its number
    for folder in (living, before):
        folder.mkdir()
    library = shm / f"__KMP_REGISTERED_LIB_{os.getpid()}_0"  # nobody keeps it open
    library.write_text("x")
    now = time.time()
    for forward_s in (0.0, 30.0):
        monkeypatch.setattr(time, "time", lambda: now + forward_s)
        assert [one.path for one in residue.find([], lambda _: False, print)] == [before]
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    assert living not in [one.path for one in residue.find([], lambda _: False, print)]
