"""The run directory: whose it is, what it is called, and a record of whole lines."""

import ast
import json
import multiprocessing
import os
import shutil
import stat
from pathlib import Path

import pytest

import hpc
from hpc.errors import RunDirectoryError
from hpc.rundir import RunDirectory, check_own, directory_name, new_run_id, run_name, write_private
from hpc.schema import Config


def test_a_directory_is_private_whatever_the_umask(tmp_path: Path) -> None:
    for mask in (0o000, 0o022, 0o077):
        before = os.umask(mask)
        try:
            run = RunDirectory.create(tmp_path / f"runs-{mask}" / "of mine", "a")
            run.append_event("one")
            write_private(run.config_file, "x: 1\n")
        finally:
            os.umask(before)
        assert {stat.S_IMODE(made.stat().st_mode) for made in (run.path, *run.path.parents[:2])} == {0o700}
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
def test_s3_s7_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
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


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="another owner needs root")
OTHER = 12345


@pytest.mark.parametrize(
    ("owner", "mode", "last", "above"),
    [
        (os.geteuid(), 0o755, True, True),
        (os.geteuid(), 0o1777, True, True),  # as /tmp: nobody can take away what is another's
        (os.geteuid(), 0o777, False, False),
        pytest.param(OTHER, 0o755, False, True, marks=AS_ROOT),  # above: a project's folder, or a container's mount
        pytest.param(OTHER, 0o1777, False, True, marks=AS_ROOT),
        pytest.param(OTHER, 0o777, False, False, marks=AS_ROOT),
    ],
)
def test_s3_s7_a_folder_on_the_way_that_somebody_else_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], owner: int, mode: int, last: bool, above: bool
) -> None:
    """`last`, `above`: whether a run directory may lie in such a folder, or in a folder of one's own in it."""
    folder = tmp_path / "project"
    for path, passes in ((folder / "run", last), (folder / "runs" / "run", above), (folder / "a" / "b" / "run", above)):
        folder.mkdir()
        folder.chmod(mode)
        if owner != os.geteuid():
            os.chown(folder, owner, -1)
        if passes:
            assert RunDirectory.make(path).path == RunDirectory.open(path).path == path
        else:
            with pytest.raises(RunDirectoryError, match=f"{folder} on the way to it.*run_root_shared=true"):
                RunDirectory.make(path)
            assert not list(folder.iterdir())
            if owner == os.geteuid():  # a local run goes on
                capsys.readouterr()
                assert RunDirectory.make(path, local=True).path.is_dir()
                assert "can be written by others" in capsys.readouterr().err
            assert RunDirectory.make(path, shared=True).path.is_dir()
            with pytest.raises(RunDirectoryError, match=f"{folder} on the way to it"):
                RunDirectory.open(path)
        shutil.rmtree(folder)


@AS_ROOT
def test_s3_s7_a_group_that_others_are_in_may_not_write_where_a_run_lies(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o2775)  # umask 002, and a group of the user's own: the rule on many machines
    RunDirectory.make(project / "a")
    os.chown(project, -1, OTHER)
    with pytest.raises(RunDirectoryError, match="can be written by others"):
        RunDirectory.make(project / "b")
    RunDirectory.make(project / "runs" / "a")


def test_s3_a_link_on_the_way_counts_by_where_it_leads(tmp_path: Path) -> None:
    """/home -> /lustre/home is normal; every folder on the link's own way is looked at as well."""
    (tmp_path / "lustre" / "home").mkdir(parents=True)
    (tmp_path / "home").symlink_to("lustre/../lustre/home")
    assert RunDirectory.create(tmp_path / "home", "a").path.parent == tmp_path / "home"
    (tmp_path / "lustre").chmod(0o777)
    with pytest.raises(RunDirectoryError, match="folder .*/lustre on the way"):
        RunDirectory.create(tmp_path / "home", "a")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(RunDirectoryError, match="too many links"):
        RunDirectory.create(tmp_path / "round" / "x", "a")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(RunDirectoryError):
        RunDirectory.create(tmp_path / "nowhere", "a")
    assert not (tmp_path / "gone").exists()


@AS_ROOT
def test_s3_s7_a_link_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    os.lchown(tmp_path / "link", OTHER, OTHER)
    with pytest.raises(RunDirectoryError, match=f"link {tmp_path}/link .* user id {OTHER}"):
        RunDirectory.create(tmp_path / "link", "a")
    assert not list((tmp_path / "mine").iterdir())


def test_s3_a_file_that_somebody_else_can_have_written_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    with pytest.raises(RunDirectoryError, match="No such file"):
        check_own(file)
    file.write_text("job: jobs.digits\n")
    check_own(file)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(RunDirectoryError, match="a link or no file"):
        check_own(tmp_path / "link")
    file.chmod(0o666)
    with pytest.raises(RunDirectoryError, match="mode 0666"):
        check_own(file)
    if os.geteuid() == 0:
        file.chmod(0o644)
        os.chown(file, OTHER, OTHER)
        with pytest.raises(RunDirectoryError, match=f"user id {OTHER}"):
            check_own(file)


def test_a_line_of_numbers_that_no_event_has_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a")
    run.append_event("one")
    for text in ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 100_000):
        with open(run.record_file, "a") as stream:
            stream.write(f'{{"event": "two", "time": {text}}}\n')
    run.append_event("three")
    assert [event["event"] for event in run.events()] == ["one", "three"]


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
    run.append_event("after")
    assert list(run.events())[-1]["event"] == "after"  # the torn line takes no other with it


def test_long_events(tmp_path: Path) -> None:
    """What an exception says may have any length; the places of thousands of nodes stay whole."""
    run = RunDirectory.create(tmp_path, "a")
    places = [[f"gpu-a100-queue-dynamic-p4d24xlarge-{number}", 8 * number, 8] for number in range(5000)]
    run.append_event("started", nodes=places)
    run.append_event("ended", first={"rank": 2, "message": "é" * 2_000_000}, alike=[{"message": "x" * 2_000_000}])
    started, ended = run.events()
    assert started["nodes"] == places
    assert ended["first"]["rank"] == 2 and ended["first"]["message"].endswith("é... (2000000 characters)")
    with pytest.raises(ValueError, match="1048576"):
        run.append_event("long", nodes=list(range(400_000)))


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


MEANT_FOR_OTHERS = {"doctor.py": "a site file, made by an administrator for everybody"}


def test_s3_no_file_is_made_by_the_umask_or_through_a_link() -> None:
    """Every file that the toolkit makes: by os.open, 0600, with a flag that follows no link; or by such a descriptor."""
    faults, makers = [], 0
    for path in sorted(Path(hpc.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called, words = ast.unparse(node.func), [ast.unparse(word) for word in node.args]
            safe = True
            if called == "os.open" and ("O_CREAT" in words[1] or words[1] == "flags"):
                makers += 1
                safe = words[1] == "flags" or "O_NOFOLLOW" in words[1] or "O_EXCL" in words[1]
                safe = safe and words[2] in (f"{0o600}", f"{0o700} if executable else {0o600}")
            elif called == "open" and len(words) > 1 and set(words[1]) & set("wax"):
                safe = words[0] == "descriptor" or words[0].startswith("os.open(") or path.name in MEANT_FOR_OTHERS
            elif called.endswith((".write_text", ".write_bytes")):
                safe = False
            if not safe:
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not faults and makers >= 8
