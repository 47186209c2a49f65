"""Devices, rendezvous, collectives that time out, and the end of the process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_server import Ranks
from steps import ROOT

from hpc.errors import EnvironmentMismatch
from hpc.ranks import RankInfo
from hpc.schema import TrainConfig
from hpc.train import distributed
from hpc.train.distributed import World, choose_device
from hpc.train.loader import core_share, set_threads_and_workers


def info(local_rank: int = 0, device_index: int | None = None) -> RankInfo:
    return RankInfo(
        rank=local_rank,
        local_rank=local_rank,
        node_rank=0,
        world_size=4,
        local_world_size=4,
        nodes=1,
        device_index=device_index,
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that some GPUs are visible."""

    def visible(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.delenv("DEVICE_INDEX", raising=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))

    return visible


def test_device_index_goes_before_local_rank(gpus: Any) -> None:
    gpus(4)
    assert choose_device("auto", info(2, device_index=3)) == torch.device("cuda", 3)
    assert choose_device("auto", info(2)) == torch.device("cuda", 2)
    assert choose_device("cpu", info(2, device_index=3)) == torch.device("cpu")


def test_r18_the_only_visible_gpu_is_taken_whatever_the_local_rank(gpus: Any) -> None:
    gpus(1)
    assert choose_device("auto", info(3)) == torch.device("cuda", 0)


@pytest.mark.parametrize(("place", "name"), [(info(3), "LOCAL_RANK=3"), (info(0, device_index=2), "DEVICE_INDEX=2")])
def test_r20_an_index_beyond_the_visible_gpus_is_refused(gpus: Any, place: RankInfo, name: str) -> None:
    gpus(2)
    with pytest.raises(EnvironmentMismatch, match=rf"{name}.*only 2 GPUs.*CUDA_VISIBLE_DEVICES=0,1"):
        choose_device("auto", place)


def test_no_gpu_is_the_cpu_with_a_note_or_a_refusal(
    gpus: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.log, "propagate", True)
    gpus(0)
    assert choose_device("auto", info()) == torch.device("cpu")
    assert "training on the CPU: no GPU is usable" in caplog.text
    with pytest.raises(EnvironmentMismatch, match="train.device=cuda, but torch can use no GPU"):
        choose_device("cuda", info())
    assert choose_device("auto", info(1, device_index=1)) == torch.device("cpu")


def test_real_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told apart from a trial cluster's GPUs by the driver."""
    gpus(0)
    driver = tmp_path / "version"
    monkeypatch.setattr(distributed, "NVIDIA_DRIVER", driver)
    assert choose_device("auto", info(1, device_index=1)) == torch.device("cpu")
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module")
    with pytest.raises(EnvironmentMismatch, match="DEVICE_INDEX=1, but torch can use no GPU"):
        choose_device("auto", info(1, device_index=1))


def test_a_launcher_that_gives_no_gpu_means_the_cpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.setenv("DEVICE_INDEX", "")
    assert choose_device("auto", info()) == torch.device("cpu")
    assert choose_device("cuda", info()) == torch.device("cuda", 0)


@pytest.mark.parametrize(("cores", "neighbours", "expected"), [(2, 1, 2), (2, 2, 1), (8, 2, 4), (2, 8, 0)])
def test_x08_cores_are_those_allowed_and_shared_with_the_neighbours(
    monkeypatch: pytest.MonkeyPatch, cores: int, neighbours: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    place = RankInfo(rank=0, local_rank=0, node_rank=0, world_size=neighbours + 1, local_world_size=neighbours, nodes=2)
    world = World(place, torch.device("cpu"), 10)
    others = [(0, list(range(cores)))] * neighbours + [(1, list(range(cores)))]
    monkeypatch.setattr(World, "all_gather", lambda self, value: others)
    assert core_share(world) == expected


def test_x08_ranks_bound_to_cores_of_their_own_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6})
    monkeypatch.setattr(World, "all_gather", lambda self, value: [(0, [1, 2, 3]), value])
    assert core_share(World(info(), torch.device("cpu"), 10)) == 3


def test_x08_threads_and_workers_follow_the_share_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    alone = World(
        RankInfo(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, nodes=1), torch.device("cpu"), 10
    )
    assert set_threads_and_workers(TrainConfig(), alone, {}) <= 2 and threads == [2]
    assert set_threads_and_workers(TrainConfig(loader_workers=5), alone, {"OMP_NUM_THREADS": "7"}) == 5
    assert threads == [2]
    set_threads_and_workers(TrainConfig(threads=3), alone, {"OMP_NUM_THREADS": "7"})
    assert threads == [2, 3]


@pytest.mark.slow
def test_l13_a_stuck_rank_is_named_soon_after_the_time_out(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(
        tmp_path,
        *("toy", "train.timeout_s=4", "train.batch_size=8", "trouble=sleep", "trouble_step=2", "trouble_rank=1"),
        ranks=3,
        patience_s=12.0,
    )
    assert trial.codes[1] == -signal.SIGKILL and trial.codes[0] == trial.codes[2] == 1, trial.text()
    assert trial.seconds < 40
    for rank in (0, 2):
        last = trial.logs[rank].splitlines()[-1]
        assert last.startswith(f"hpc.train: error: rank {rank}: a collective did not end within train.timeout_s=4")
        assert "stuck or gone: rank 1;" in last


def test_l13_a_connection_that_another_ranks_time_out_closed_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rank that saw it would be the first to fail, and the one that is stuck would not be named."""
    monkeypatch.setattr(distributed, "ANSWER_S", 0.5)
    monkeypatch.setattr(distributed, "CONSEQUENCE_S", 0.2)
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8884.")
    late = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation")
    store = dist.PrefixStore("hpc", dist.HashStore())
    worlds = [World(info(rank), torch.device("cpu"), 4, store) for rank in range(4)]
    assert worlds[2].blame(lost) is None, "nobody timed out: that peer has crashed"
    for message in ("mat1 and mat2 shapes cannot be multiplied", "DataLoader timed out after 5 seconds"):
        assert worlds[2].blame(RuntimeError(message)) is None, "no collective"
    for world, error in ((worlds[0], late), (worlds[3], lost)):
        assert "stuck or gone: rank 1" in str(world.blame(error)) and world.rank in (0, 3)
    assert str(worlds[3].blame(lost)).startswith(
        "rank 3: a collective did not end within train.timeout_s=4; stuck or gone: rank 1;"
    )


def test_l13_a_rank_that_is_late_to_time_out_still_says_so_when_rank_0_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 leaves with its store once it knows who is stuck; a rank that began to wait later is still asking it."""
    monkeypatch.setattr(distributed, "ANSWER_S", 5.0)
    late = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation")
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8884.")
    inner = dist.HashStore()

    class Leaving(dist.Store):
        """Answers so many questions, and is gone then."""

        def __init__(self, questions: int) -> None:
            super().__init__()
            self.questions = questions

        def append(self, key: str, value: str) -> None:
            self._ask()
            inner.append(key, value)

        def check(self, keys: list[str]) -> bool:
            self._ask()
            return inner.check(keys)

        def get(self, key: str) -> bytes:
            return inner.get(key)

        def _ask(self) -> None:
            self.questions -= 1
            if self.questions < 0:
                raise dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")

    def world(questions: int) -> World:
        return World(info(2), torch.device("cpu"), 4, Leaving(questions))

    inner.append("timed-out", "0 ")
    assert "stuck or gone: rank 1, 3;" in str(world(3).blame(late)), "it was there for one look at both keys"
    for questions in (0, 1):
        assert "not known here, but to rank 0, which has given up before;" in str(world(questions).blame(late))
    assert world(0).blame(lost) is None, "rank 0 has crashed"


@pytest.mark.slow
def test_c09_a_good_run_ends_in_seconds_without_a_warning(ranks: Ranks, tmp_path: Path) -> None:
    trial = ranks(tmp_path, "toy", ranks=2).check()
    assert trial.seconds < 30
    assert "arning" not in trial.text() and trial.logs[1] == ""


@pytest.mark.slow
def test_c10_the_traceback_of_a_failing_rank_is_the_last_thing_it_says(ranks: Ranks, tmp_path: Path) -> None:
    errors = tmp_path / "error.json"
    trial = ranks(
        tmp_path,
        *("toy", "trouble=raise", "trouble_step=2", "trouble_rank=1", "train.batch_size=8"),
        ranks=2,
        env={"TORCHELASTIC_ERROR_FILE": str(errors)},
    )
    assert trial.codes == [1, 1]
    assert trial.logs[1].splitlines()[-1] == "ValueError: bad batch 17"
    assert trial.logs[1].startswith("Traceback (most recent call last):")
    assert "arning" not in trial.logs[1] and "destroy_process_group" not in trial.text()


@pytest.mark.slow
def test_ranks_that_never_come_are_given_up_in_time(ranks: Ranks, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        trial = ranks(tmp_path, "toy", "launch.rendezvous_timeout_s=2", env=env)
    assert trial.codes == [69] and trial.seconds < 30
    last = trial.logs[0].splitlines()[-1]
    assert f"rank 1 of 2 on {socket.gethostname()} did not meet the others at 127.0.0.1:" in last
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    trial = ranks(tmp_path, "toy", "launch.rendezvous_timeout_s=2", env=env)
    assert trial.codes == [69], trial.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks go from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    ranks: Ranks, tmp_path: Path, env: dict[str, str], word: str
) -> None:
    trial = ranks(tmp_path, "toy", env=env)
    assert trial.codes == [78] and word in trial.logs[0].splitlines()[-1]


@pytest.mark.slow
def test_c06_loader_processes_bear_the_notices_of_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    arguments = ("toy", "train.loader_workers=2", "train.batch_size=4", "trouble=signal", "trouble_step=2")
    ranks(tmp_path, *arguments, "train.epochs=2").check()


TWICE = """\
import os, signal
from hpc.schema import TrainConfig
from hpc.train.distributed import connect

with connect(TrainConfig(device="cpu"), 60) as world:
    world.store.add("seen", 1)
    world.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
    line = f"rank {world.rank} of {world.size} met, seen {world.store.add('seen', 0)}\\n"
    os.write(1, line.encode())  # in one piece: torchrun starts Python with -u, and both ranks write to one pipe
"""


@pytest.mark.slow
def test_the_ranks_meet_again_after_a_restart_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*argv, str(tmp_path / "twice.py")], env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 met, seen 2" for rank in range(2)]
