"""Files that run a command when somebody loads them carelessly: none does here, and each is refused or passed over.

Each evil file is first loaded the careless way, to show that its command does run.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from submit_shell import ROOT, Shell

from hpc import snapshot
from hpc.allocation import verdict
from hpc.config import load, load_text
from hpc.errors import HpcError
from hpc.login import status
from hpc.rundir import RunDirectory, read_error_file
from hpc.train import checkpoint, metrics
from hpc.train.checkpoint import CheckpointError, Checkpoints, damage

pytestmark = pytest.mark.usefixtures("nobody_elses_settings")


class Evil:
    """Touches the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "CANARY"


def fires(canary: Path, load_carelessly: Callable[[], object]) -> None:
    """The witness: loaded the careless way the file does run its command."""
    load_carelessly()
    canary.rmdir()


def yaml_of(canary: Path) -> str:
    return f"name: !!python/object/apply:os.mkdir ['{canary}']\n"


def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "a", "1")


# --- checkpoints: the manifest is right in all of them, since who can write the file can write that too ----------------


def zipped(path: Path, evil: Evil) -> None:
    torch.save({"weight": torch.ones(3), "evil": evil}, path)


def old_form(path: Path, evil: Evil) -> None:
    torch.save({"evil": evil}, path, _use_new_zipfile_serialization=False)


def bare_pickle(path: Path, evil: Evil) -> None:
    path.write_bytes(pickle.dumps({"evil": evil}, 2))


def tar_form(path: Path, evil: Evil) -> None:
    """As torch 0.1 wrote it."""
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            data = pickle.dumps(evil) if name == "storages" else pickle.dumps(0)
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def by_hand(path: Path, evil: Evil) -> None:
    """A zip archive of torch's whose pickle was put in afterwards."""
    good = io.BytesIO()
    torch.save({"weight": torch.ones(3)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickle.dumps(evil, 2) if name.endswith("data.pkl") else source.read(name))


def careless(path: Path) -> Callable[[], object]:
    def load_it() -> None:
        try:
            torch.load(path, weights_only=False)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError):
            return  # it has run by then

    return load_it


@pytest.mark.parametrize("name", ["model.pt", "trainer.pt"])
@pytest.mark.parametrize("form", [zipped, old_form, bare_pickle, tar_form, by_hand])
def test_s4_an_evil_checkpoint_is_refused_by_name(tmp_path: Path, canary: Path, form: Any, name: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.prepare()
    path = checkpoints.write(3, {"weight": torch.ones(3)}, {"position": {}})
    (path / name).unlink()
    form(path / name, Evil(canary))
    if form is bare_pickle:
        fires(canary, lambda: pickle.loads((path / name).read_bytes()))
    else:
        fires(canary, careless(path / name))
    files = {
        file: {"size": (path / file).stat().st_size, "sha256": sha256(path / file)}
        for file in ("model.pt", "trainer.pt")
    }
    content = {"format": checkpoint.FORMAT, "step": 3, "files": files}
    (path / "manifest.json").write_bytes(checkpoint._manifest(content))
    assert checkpoints.newest() == path and damage(path) is None
    with pytest.raises(CheckpointError, match=f"step-3/{name} is refused by safe loading") as caught:
        checkpoint.read(path)
    assert "\n" not in str(caught.value) and not canary.exists()


def sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["../../evil.pt", "/tmp/evil.pt", "model.pt/../../evil.pt", "evil.pkl", ".."])
def test_s4_a_manifest_cannot_name_other_files(tmp_path: Path, canary: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.prepare()
    path = checkpoints.write(3, {"weight": torch.ones(3)}, {})
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(canary)))
    files = json.loads((path / "manifest.json").read_text())["files"]
    facts = {"size": (tmp_path / "evil.pt").stat().st_size, "sha256": sha256(tmp_path / "evil.pt")}
    content = {"format": checkpoint.FORMAT, "step": 3, "files": {**files, name: facts}}
    (path / "manifest.json").write_bytes(checkpoint._manifest(content))
    assert "manifest.json lists" in str(damage(path)) and not canary.exists()


@pytest.mark.parametrize("linked", ["step-3", "step-3/model.pt", "step-3/manifest.json"])
def test_s4_a_link_in_a_checkpoint_is_not_followed(tmp_path: Path, linked: str) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.prepare()
    checkpoints.write(3, {"weight": torch.ones(3)}, {})
    elsewhere = tmp_path / "elsewhere"
    os.rename(checkpoints.folder / linked, elsewhere)
    (checkpoints.folder / linked).symlink_to(elsewhere)
    assert "link" in str(damage(checkpoints.path(3)))
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        checkpoints.newest()


# --- YAML: every place from which a configuration is read --------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "handed on", "site file", "override", "base.yaml", "run directory"])
def test_s4_evil_yaml_is_refused_with_its_place(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., str], place: str
) -> None:
    text = yaml_of(canary)
    fires(canary, lambda: yaml.UnsafeLoader(text).get_single_data())
    file = tmp_path / "evil.yaml"
    file.write_text(text)
    job = write_job(base=text) if place == "base.yaml" else None
    if place == "site file":
        monkeypatch.setenv("HPC_SITE_CONFIG", str(file))
    if place == "run directory":
        run = run_directory(tmp_path)
        run.config_file.write_text(text)
        argv = [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run.path)]
        done = subprocess.run(argv, env=plain_environ(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and re.search(r"config\.yaml, line 1: .*python/object", done.stderr)
    else:
        with pytest.raises(HpcError, match="python/object"):
            {
                "file": lambda: load(files=[file]),
                "handed on": lambda: load_text(text),
                "site file": load,
                "override": lambda: load(overrides=["slurm.extra={x: " + text.partition(": ")[2].strip() + "}"]),
                "base.yaml": lambda: load(job=job),
            }[place]()
    assert not canary.exists()


def plain_environ() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "HPC_SITE_CONFIG": ""}


def spoil_owner(run: RunDirectory) -> None:
    os.chown(run.path, 12345, 12345)


def spoil_mode(run: RunDirectory) -> None:
    run.path.chmod(0o770)


def spoil_file(run: RunDirectory) -> None:
    run.config_file.chmod(0o666)


@pytest.mark.parametrize("spoil", [None, spoil_owner, spoil_mode, spoil_file])
def test_s4_s7_a_config_that_somebody_else_can_have_written_starts_nothing(
    tmp_path: Path, canary: Path, spoil: Callable[[RunDirectory], None] | None
) -> None:
    """It names a command, so that whoever writes it decides what is run. `None` shows that it would be."""
    if spoil is spoil_owner and os.geteuid() != 0:
        pytest.skip("another owner needs root")
    run = run_directory(tmp_path)
    run.config_file.write_text(f"command: [mkdir, '{canary}']\n")
    run.config_file.chmod(0o600)
    if spoil is not None:
        spoil(run)
    argv = [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run.path)]
    done = subprocess.run(argv, env=plain_environ(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert canary.exists() == (spoil is None)
    if spoil is not None:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and str(run.path) in done.stderr


# --- what else lies in a run directory ---------------------------------------------------------------------------------


def test_s4_evil_files_among_the_run_directorys_own_are_passed_over(tmp_path: Path, canary: Path) -> None:
    """Pickles under the names of our own files, submitit's, and NumPy's object arrays: nobody unpickles any of them."""
    run = run_directory(tmp_path)
    attempt, evil = run.attempt(0), pickle.dumps(Evil(canary))
    array = io.BytesIO()
    numpy.save(array, numpy.array([Evil(canary)], dtype=object), allow_pickle=True)
    fires(canary, lambda: pickle.loads(evil))
    fires(canary, lambda: numpy.load(io.BytesIO(array.getvalue()), allow_pickle=True))
    for folder in (attempt, run.code, run.checkpoints / "step-9", run.tensorboard):
        folder.mkdir(parents=True)
    names = ["attempt-0/outcome.json", "attempt-0/error-0.json", "attempt-0/error-task-0.json", "metrics.jsonl"]
    names += ["record.jsonl", "101_submitted.pkl", "101_0_result.pkl", "code/.manifest.json", "data.npy"]
    names += ["checkpoints/step-9/manifest.json", "tensorboard/events.out.tfevents.1"]
    for name in names:
        (run.path / name).write_bytes(array.getvalue() if name.endswith("npy") else evil + b"\n" + evil)
    assert list(run.events()) == [] and "no attempt has begun" in status.report_lines(run.path)
    assert metrics.read(run.metrics_file) == []
    assert read_error_file(attempt / "error-0.json") == ("", "", None)
    assert verdict.read_end(attempt, 1, started=False).reported is False
    assert snapshot.read(run.code) is None
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        Checkpoints(run.checkpoints).newest()
    run.config_file.write_text("command: [sh, -c, 'echo all is well']\n")
    argv = [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run.path)]
    done = subprocess.run(argv, env=plain_environ(), cwd=run.path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "all is well" in done.stdout, done.stderr
    assert not canary.exists()


LINES = [
    '{"event": "submitted", "job_id": "1; mkdir CANARY"}',
    '{"event": "submitted", "job_id": ["$(mkdir CANARY)"], "time": 1e300}',
    '{"event": "continued", "attempt": 0, "job_id": {"a": 1}, "new_job_id": ["--help"]}',
    '{"event": "started", "attempt": "0", "nodes": [["\\u001b[2J", 0, 1], [], 5], "time": -1}',
    '{"event": "started", "attempt": 0, "nodes": {"a": 1}, "time": 1e12, "restart": "x"}',
    '{"event": "ended", "attempt": 0, "first": {"rank": "\\u001b[2J\\r", "host": [], "message": {}}, "time": 9}',
    '{"event": "ended", "attempt": 0, "first": [1], "code": "0", "steps_from": [], "steps_to": 1e9}',
    '{"event": "decided", "attempt": 0, "reason": ["\\r\\n"], "decision": {"a": 1}, "lost_nodes": [["a"]]}',
    '{"event": "ending", "attempt": 0, "by_slurm": {"x": 1}, "lost_nodes": "n1"}',
    '{"event": "saved", "attempt": 0, "step": 1e300, "stall_s": -5, "time": 10}',
    '{"event": {"py/object": "os.system"}, "attempt": 999999999999999999}',
    '{"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": ["CANARY"]}]}',
    '["event"]',
    "\x00\x1b[2J",
]


def test_s4_s9_an_evil_line_of_the_record_is_only_text(tmp_path: Path, canary: Path) -> None:
    """All doors that read it: status prints it without a control character, --continue sends nothing by it."""
    shell = Shell(tmp_path)
    run = run_directory(tmp_path)
    run.job_script.write_text("#!/bin/bash\n")
    for lines in ([line] for line in LINES), [LINES], [LINES[::-1]]:
        for some in lines:
            run.record_file.write_text("\n".join(some) + "\n")
            assert all(isinstance(line, str) for line in status.report_lines(run.path))
    run.record_file.write_text("\n".join(LINES) + "\n")
    environ = {**shell.environ, "PWD": str(tmp_path)}
    argv = [sys.executable, "-m", "hpc.status", str(run.path)]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and all(line.isprintable() for line in done.stdout.split("\n"))
    for line in LINES[:3]:
        run.record_file.write_text(f"{line}\n")
        done = shell.send("--continue", str(run.path))
        assert done.returncode == 1 and "is not a job id" in done.stderr and not shell.submissions()
    assert not list(tmp_path.rglob("CANARY"))
