"""Which of several failures is the cause."""

import json
from pathlib import Path

import pytest

from hpc.node.outcome import Failure, first_failure
from hpc.node.worker import write_error_file
from hpc.rundir import read_error_file

GLOO = (
    "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3995. This is typically caused by a remote worker"
)


def failure(rank: int, time: float, message: str = "ValueError: x", **more: object) -> Failure:
    return Failure(rank=rank, host="n1", code=1, time=time, message=message, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, 2.0), failure(1, 1.0)], 1),
        ([failure(0, 1.0, GLOO), failure(2, 1.5)], 2),  # a consequence that was noticed earlier
        ([failure(0, 1.0, GLOO), failure(1, 1.1, "killed by SIGKILL, perhaps out of host memory")], 1),
        ([failure(0, 1.0, "ended", by_us=True), failure(3, 9.0, GLOO)], 3),
        ([failure(2, 1.0), failure(1, 1.0)], 1),
        ([failure(0, 1.0, GLOO), failure(1, 2.0, GLOO)], 0),
    ],
)
def test_the_cause_comes_first(failures: list[Failure], rank: int) -> None:
    found = first_failure(failures)
    assert found is not None and found.rank == rank
    assert first_failure(reversed(failures)) == found


def test_no_failure_has_no_cause() -> None:
    assert first_failure([]) is None


def test_a_failure_survives_the_way_between_agents() -> None:
    one = failure(3, 1.5, "ünï\n", traceback="Traceback", log="/l", by_us=True)
    assert Failure.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_error_files_of_ours_and_of_torch_are_read(tmp_path: Path) -> None:
    ours = tmp_path / "error-0.json"
    try:
        raise ValueError("bad batch 17")
    except ValueError as error:
        write_error_file(str(ours), error)
    message, trace, moment = read_error_file(ours)
    assert message == "ValueError: bad batch 17" and "bad batch 17" in trace and moment is not None
    assert ours.stat().st_mode & 0o777 == 0o600
    write_error_file(str(ours), KeyError("later"))
    assert read_error_file(ours)[0] == message  # the first one counts
    theirs = tmp_path / "error-1.json"
    record = {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}
    theirs.write_text(json.dumps({"message": record}))
    assert read_error_file(theirs) == ("KeyError: 'x'", "Traceback ...", None)
    for text in ("", "{", "[]", '{"message": 5}', '{"other": 1}', "\x00"):
        theirs.write_text(text)
        assert isinstance(read_error_file(theirs)[0], str)
    assert read_error_file(tmp_path / "none") == ("", "", None)
