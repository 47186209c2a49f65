"""A worker's place among all workers, and its form in the environment: torchrun's variables.

Source of the names: PyTorch's documentation, "torchrun (Elastic Launch)", "Environment Variables".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpc.errors import EnvironmentMismatch


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the workers meet: rank zero's host and the port of its store."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One worker's place. `device_index` counts within the GPUs that are visible; None on the CPU."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    device_index: int | None = None

    def to_environ(self, rendezvous: Rendezvous, *, run_id: str, attempt: int = 0) -> dict[str, str]:
        """The variables that torchrun sets for a worker, and DEVICE_INDEX (empty on the CPU) beside them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "NODE_RANK": str(self.node_rank),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(rendezvous.port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "DEVICE_INDEX": "" if self.device_index is None else str(self.device_index),
        }


SINGLE_PROCESS = RankInfo(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, nodes=1)


def from_environ(environ: Mapping[str, str] | None = None) -> RankInfo:
    """This worker's place as the launcher told it; rank 0 of 1 when no launcher did.

    RANK and WORLD_SIZE are needed together; LOCAL_RANK and LOCAL_WORLD_SIZE may be missing (one node is assumed).

    Raises:
        EnvironmentMismatch: one of RANK and WORLD_SIZE is missing, a value is no number, or a rank is outside its world.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return SINGLE_PROCESS
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise EnvironmentMismatch(
                f"{other}={env[other]} is set but {name} is not: set both, or start with torchrun or `python -m hpc.node`"
            )
    rank, world_size = _number(env, "RANK", 0), _number(env, "WORLD_SIZE", 1)
    local_rank = _number(env, "LOCAL_RANK", rank)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", world_size)
    if not 0 <= rank < world_size:
        raise EnvironmentMismatch(f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to {world_size - 1}")
    if not 0 <= local_rank < local_world_size:
        raise EnvironmentMismatch(
            f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world_size}: "
            f"local ranks go from 0 to {local_world_size - 1}"
        )
    device = env.get("DEVICE_INDEX", "")
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        node_rank=_number(env, "GROUP_RANK", rank // local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        nodes=_number(env, "GROUP_WORLD_SIZE", -(-world_size // local_world_size)),
        device_index=int(device) if device.isdigit() else None,
    )


def ranges(ranks: Iterable[int]) -> str:
    """ "2,3" for two ranks, "4-7" for more in a row."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [f"{a}-{b}" if b - a > 1 else ",".join(str(n) for n in range(a, b + 1)) for a, b in parts]
    return ",".join(texts)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise EnvironmentMismatch(f"{name}={text!r} is not a number; unset it or set it to one") from None
