"""The ledger of nodes that failed: written by many at once, read in spite of damage, and what submission makes of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submit_shell import ROOT, Shell

from hpc import ledger
from hpc.allocation.allocation import Allocation
from hpc.allocation.requeue import facts_of, with_failed
from hpc.ledger import Failure

NOW = time.time()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "hpc" / "failed-nodes.jsonl"


def failed(node: str, hours_ago: float = 0.0, **more: str) -> Failure:
    return Failure(node=node, time=NOW - hours_ago * 3600, why=more.pop("why", "lost"), **more)


def test_what_is_written_is_read_and_expires(state: Path) -> None:
    assert ledger.recent(24) == []
    ledger.add(
        [failed("old", 30), failed("n2", 3, job_id="7", cluster="a"), failed("n1", 1, cluster="b"), failed("n3")]
    )
    assert [one.node for one in ledger.recent(24)] == ["n2", "n1", "n3"]
    assert [one.node for one in ledger.recent(2)] == ["n1", "n3"]
    assert [one.node for one in ledger.recent(24, cluster="a")] == ["n2", "n3"]
    assert ledger.recent(24)[0].told(NOW) == "n2 (lost 3 h ago, job 7)"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600 and stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    assert ledger.forget(["n1", "other"]) == ["n1"] and [one.node for one in ledger.recent(24)] == ["n2", "n3"]
    assert ledger.recent(0.0) == []


def test_damage_costs_no_more_than_the_damaged_lines(state: Path) -> None:
    ledger.add([failed("n1", 2)])
    junk = (
        b'{"time": 1, "node"', b"[]", b"7", b"\xff\xfe\0", b"[" * 100_000, b'{"time": "x", "node": "n5"}',
        b'{"time": NaN, "node": "n5"}', b'{"time": %d, "node": "n5 --uid=0"}' % NOW, b'{"time": %d, "node": 5}' % NOW,
        b'{"time": %d, "node": "n6", "why": ["a\\u001b[2J"]}' % NOW, b'{"time": 9e99, "node": "n7"}',
    )  # fmt: skip
    with open(state, "ab") as stream:
        stream.write(b"\n".join(junk))  # the last line has no end: a writer was killed in it
    ledger.add([failed("n2", 1)])
    assert [one.node for one in ledger.recent(24)] == ["n1", "n2", "n6"]
    assert "\x1b" not in ledger.recent(24)[2].told(NOW)


def test_a_file_that_others_may_write_to_counts_for_nothing(state: Path, tmp_path: Path) -> None:
    ledger.add([failed("n1")])
    state.chmod(0o666)
    assert ledger.recent(24) == []
    with pytest.raises(OSError, match="alone"):
        ledger.add([failed("n2")])
    state.unlink()
    (tmp_path / "elsewhere").write_text("")
    state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        ledger.add([failed("n2")])
    assert (tmp_path / "elsewhere").read_text() == "" and ledger.recent(24) == []


@pytest.mark.parametrize("impatient", [0, 2])
def test_many_writers_at_once_lose_nothing_and_the_file_stays_small(
    state: Path, monkeypatch: pytest.MonkeyPatch, impatient: int
) -> None:
    """Also where some do not get the lock, while others exchange the file."""
    code = (
        "import sys, time\nfrom hpc import ledger\nledger.SIZE_LIMIT = 4096\n"
        "if sys.argv[2] == 'True': ledger.LOCK_LIMIT_S = 0.0\n"
        "for n in range(60): ledger.add([ledger.Failure(node=f'n{n}', time=time.time(), why='lost', job_id=sys.argv[1])])\n"
        "ledger.add([ledger.Failure(node='old', time=1.0, why='x' * 100)] * 100)\n"
    )
    argv, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [subprocess.Popen([*argv, str(job), str(job < impatient)], env=env) for job in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    seen = {(one.node, one.job_id) for one in ledger.recent(24)}
    assert seen == {(f"n{n}", str(job)) for n in range(60) for job in range(4)}
    monkeypatch.setattr(ledger, "SIZE_LIMIT", 4096)
    ledger.add([failed("last")])
    assert state.stat().st_size < 60 * 4 * 120 and ledger.recent(24)[-1].node in ("last", "n59")
    assert [path.name for path in state.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("known", "usable", "already", "wanted", "chosen"),
    [
        (["n1"], 8, [], 2, ["n1"]),
        (["n1", "n2", "n3"], 8, [], 1, ["n3", "n2"]),  # a quarter, the last ones
        (["n1", "n1", "n2", "n3"], 8, [], 1, ["n1", "n3"]),  # the worst first
        (["n1", "n2"], 2, [], 1, ["n2"]),  # of few nodes, one
        (["n1"], 2, [], 2, []),  # all are needed
        (["n1", "n2"], 8, ["n1"], 2, ["n2"]),
        (["n1", "n2"], 8, [], 7, ["n2"]),
        (["other"], 8, [], 1, []),
        (["n1"], 0, [], 1, []),
        (["n1"], 2, ["n1", "n2"], 1, []),
    ],
)
def test_never_more_than_can_be_spared(
    known: list[str], usable: int, already: list[str], wanted: int, chosen: list[str]
) -> None:
    failures = [failed(node, 5 - index) for index, node in enumerate(known)]
    found = ledger.to_leave_out(failures, [f"n{n + 1}" for n in range(usable)], already=already, wanted=wanted)
    assert [one.node for one in found] == chosen


def test_x14_at_a_requeue_known_bad_nodes_are_left_out_besides_the_lost_ones() -> None:
    allocation = Allocation(job_id="7", nodes=2, node_list="n[1-2]")
    usable = {f"n{n}": ("gpu:4", "") for n in range(1, 9)} | {"cpu1": ("(null)", "")}
    facts = facts_of({"JobState": "RUNNING", "ExcNodeList": "n8"})
    ledger_of = [failed("cpu1"), failed("n5", 2)]
    assert with_failed(("n8", "n1"), ledger_of, facts, allocation, usable) == ("n8", "n1", "n5")
    assert with_failed((), ledger_of, facts, allocation, usable) == ("n8", "n5")
    assert with_failed((), [failed("n8"), failed("cpu1")], facts, allocation, usable) == ()
    for certain in ({"ReqNodeList": "n[1-2]"}, {"Reservation": "course"}):
        named = facts_of({"JobState": "RUNNING", **certain})
        assert with_failed((), ledger_of, named, allocation, usable) == ()


# ---- at submission ---------------------------------------------------------------------------------------------------

PARTITIONS = "low*|up|1:00:00|4|8|32000|gpu:4|(null)\ncpu|up|1:00:00|4|8|32000|(null)|(null)\n"
NODES = "".join(
    f"{node}|8|{1000000 if node[:2] in ('n4', 'n5') else 32000}\n"
    for node in ("n1|idle|gpu:4|a", "n2|mixed|gpu:4|a", "n3|down*|gpu:4|a", "n4|idle|gpu:2|a", "n5|idle|gpu:4|b")
)


@pytest.fixture
def shell(tmp_path: Path, state: Path) -> Shell:
    shell = Shell(tmp_path)
    (shell.answers / "sinfo").write_text(PARTITIONS)
    (shell.answers / "sinfo.2").write_text(NODES)
    (shell.answers / "scontrol_show").write_text("ClusterName             = here\n")
    return shell


def excluded(shell: Shell) -> list[str]:
    return [word for word in json.loads(shell.kept("argv.json")) if word.startswith("--exclude")]


def test_x14_submission_leaves_out_what_failed_lately_and_says_so(shell: Shell) -> None:
    ledger.add([failed("n5", 3, job_id="7", cluster="here"), failed("n1", 1, cluster="elsewhere"), failed("n4", 1)])
    done = shell.send("--gpus-per-node", "4", "--exclude", "n[8-9]")
    assert done.returncode == 0, done.stderr
    (note,) = done.stderr.splitlines()
    assert note.startswith("hpc.submit: note: left out: n5 (lost 3 h ago, job 7); slurm.exclude_failed_h=0 ")
    assert excluded(shell) == ["--exclude=n[8-9],n5"]
    (run_dir,) = shell.runs()
    assert "n5" not in (run_dir / "job.sh").read_text() + (run_dir / "config.yaml").read_text()


@pytest.mark.parametrize(
    "words",
    [["slurm.exclude_failed_h=0"], ["slurm.exclude_failed_h=2"], ["--nodelist", "n5"], ["--nodes", "3"]]
    + [["slurm.reservation=course"], ["--mem", "64G"], ["slurm.mem_per_gpu=16G"], ["--cpus-per-gpu", "3"]],
)
def test_nothing_is_left_out_when_switched_off_expired_or_needed(shell: Shell, words: list[str]) -> None:
    ledger.add([failed("n5", 3)])
    done = shell.send("--gpus-per-node", "4", *words)
    assert (done.returncode, done.stderr, excluded(shell)) == (0, "", [])


def test_a_slurm_that_does_not_answer_costs_the_ledger_and_no_more(shell: Shell) -> None:
    ledger.add([failed("n5", 3)])
    (shell.answers / "sinfo.exit").write_text("1\n")
    done = shell.send("--gpus-per-node", "4")
    assert done.returncode == 0 and "not left out" in done.stderr and excluded(shell) == []


def test_the_door_shows_and_forgets(shell: Shell) -> None:
    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "hpc.doctor", *words]
        return subprocess.run(argv, env=shell.environ, cwd=shell.folder, capture_output=True, text=True, timeout=60)

    assert doctor("--failed-nodes").stdout.startswith("no node")
    ledger.add([failed("n5", 3), failed("n1", 30), failed("n5", 2, why="unfit: 3 GPUs of 4")])
    assert [line.split()[:2] for line in doctor("--failed-nodes").stdout.splitlines()[1:]] == [
        ["n1", "lost"], ["n5", "lost"], ["n5", "unfit:"],
    ]  # fmt: skip
    done = doctor("--forget", "n5", "n9")
    assert (done.returncode, done.stdout) == (0, "forgotten: n5\n") and [one.node for one in ledger.recent(99)] == [
        "n1"
    ]
