"""The run directory: whose it is, what it is called, and a record of whole lines."""

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from hpc.errors import RunDirectoryError
from hpc.rundir import RunDirectory, directory_name, new_run_id, run_name, write_private
from hpc.schema import Config


def test_a_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    for mask in (0o000, 0o022, 0o077):
        before = os.umask(mask)
        try:
            run = RunDirectory.create(tmp_path / "runs", "a")
            run.append_event("one")
            write_private(run.config_file, "x: 1\n")
        finally:
            os.umask(before)
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in run.path.iterdir()} == {0o600}


def test_ids_are_unique_and_a_given_id_is_the_same_directory(tmp_path: Path) -> None:
    paths = {RunDirectory.create(tmp_path, "a").path for _ in range(20)}
    assert len(paths) == 20 and len({new_run_id() for _ in range(200)}) > 190
    assert RunDirectory.create(tmp_path, "a", "7").path == RunDirectory.create(tmp_path, "a", "7").path


def test_an_id_that_somebody_has_drawn_already_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["same", "same", "same", "other", *["same"] * 1000])
    monkeypatch.setattr("hpc.rundir.new_run_id", lambda: next(drawn))
    assert [RunDirectory.create(tmp_path, "a").path.name for _ in range(2)] == ["a-same", "a-other"]
    with pytest.raises(RunDirectoryError, match="File exists"):
        RunDirectory.create(tmp_path, "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="another owner needs root")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(RunDirectoryError, match="12345"):
        RunDirectory.open(path)


def test_a_directory_that_others_may_write_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for mode in (0o770, 0o707, 0o777):
        path.chmod(mode)
        with pytest.raises(RunDirectoryError, match="chmod go-w"):
            RunDirectory.open(path)
    path.chmod(0o755)  # opened for reading by the user
    RunDirectory.open(path)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").touch()
    for other in ("link", "file", "none"):
        with pytest.raises(RunDirectoryError):
            RunDirectory.open(tmp_path / other)


def _write(path: Path, number: int) -> None:
    run = RunDirectory(path)
    for count in range(100):
        run.append_event("e", writer=number, count=count, filler="x" * (number * 500))


def test_lines_of_several_writers_stay_whole_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(run.path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = run.record_file.read_text().splitlines()
    assert len(lines) == 400 and all(json.loads(line)["event"] == "e" for line in lines)
    data = run.record_file.read_bytes()
    for cut in range(len(data) - 600, len(data), 7):
        run.record_file.write_bytes(data[:cut])
        assert len(list(run.events())) >= 398
    with pytest.raises(ValueError, match="65536"):
        run.append_event("long", text="x" * 70_000)


def test_a_record_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run.record_file.symlink_to(victim)
    with pytest.raises(OSError):
        run.append_event("one")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config(), "digits"),
        (Config(name="my run"), "my run"),
        (Config(command=["dir/train.py", "x"]), "train"),
        (Config(command=["python", "-m", "pkg.mod"]), "pkg.mod"),
        (Config(command=["python3.11", "-u", "a.py"]), "a"),
        (Config(command=["./binary"]), "binary"),
    ],
)
def test_names_of_runs(config: Config, name: str) -> None:
    assert run_name(config) == name


@pytest.mark.parametrize(
    ("name", "directory"), [("a b/c", "a_b_c"), ("../x", "_x"), ("-n", "n"), ("", "run"), ("é实", "é实")]
)
def test_names_of_directories(name: str, directory: str) -> None:
    assert directory_name(name) == directory
