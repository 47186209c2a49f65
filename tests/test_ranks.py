"""Ranks to and from torchrun's variables, and exit codes in words."""

import pytest

from hpc import exitcodes
from hpc.errors import EnvironmentMismatch
from hpc.ranks import SINGLE_PROCESS, RankInfo, Rendezvous, from_environ


def test_there_and_back() -> None:
    info = RankInfo(rank=5, local_rank=1, node_rank=1, world_size=8, local_world_size=4, nodes=2, device_index=1)
    environ = info.to_environ(Rendezvous(host="10.0.0.1", port=12345), run_id="7", attempt=2)
    assert from_environ(environ) == info
    assert environ["MASTER_ADDR"] == "10.0.0.1" and environ["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert from_environ({}) == SINGLE_PROCESS


def test_what_plain_torchrun_or_a_hand_sets_is_enough() -> None:
    info = from_environ({"RANK": "3", "WORLD_SIZE": "4"})
    assert (info.rank, info.local_rank, info.local_world_size, info.device_index) == (3, 3, 4, None)


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2")),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK=-1",)),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ("RANK='x'",)),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"),
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_both_values(environ: dict[str, str], texts: tuple[str, ...]) -> None:
    with pytest.raises(EnvironmentMismatch) as caught:
        from_environ(environ)
    assert all(text in str(caught.value) for text in texts)


@pytest.mark.parametrize(
    ("returncode", "code", "words"),
    [
        (0, 0, "exited 0"),
        (3, 3, "exited 3"),
        (-9, 137, "killed by SIGKILL, perhaps out of host memory"),
        (-11, 139, "killed by SIGSEGV"),
        (255, 255, "exited 255"),
    ],
)
def test_exit_codes(returncode: int, code: int, words: str) -> None:
    assert exitcodes.from_returncode(returncode) == code
    assert exitcodes.describe(code) == words
