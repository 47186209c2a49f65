"""Host lists in the contestants' interpreter: our parser and submitit's in turn, and ours against scontrol.

python hostlists.py time ROUNDS        {"shape": {"ours": [seconds, ...], "submitit": [...]}}
python hostlists.py fuzz COUNT         {"texts": n, "different": n, "first": text}
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SHAPES = {
    "ranges": "node[1-50000],gpu[1-50000]",
    "143 racks": ",".join(f"rack{rack:03d}-[001-700]" for rack in range(1, 144)),
    "single names": ",".join(f"node{number:06d}" for number in range(100_000)),
}


def take_times(rounds: int) -> dict[str, dict[str, list[float]]]:
    from submitit.slurm.slurm import _parse_node_list

    from hpc.slurm.nodelist import expand_nodelist

    parsers = {"ours": expand_nodelist, "submitit": _parse_node_list}
    found: dict[str, dict[str, list[float]]] = {}
    for shape, text in SHAPES.items():
        assert expand_nodelist(text) == _parse_node_list(text), shape
        seconds = found[shape] = {name: [] for name in parsers}
        for turn in range(rounds):
            for name in list(parsers)[:: 1 if turn % 2 == 0 else -1]:
                begun = time.perf_counter()
                parsers[name](text)
                seconds[name].append(time.perf_counter() - begun)
    return found


def compare(count: int) -> dict[str, object]:
    """Generated texts, many of them a little wrong; a refusal by both is equal too."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from test_nodelist import _generated

    from hpc.errors import NodelistError
    from hpc.slurm.nodelist import expand_nodelist

    configuration = Path(tempfile.mkstemp(suffix=".conf")[1])
    configuration.write_text("ClusterName=x\nSlurmctldHost=localhost\n")
    environ = {**os.environ, "SLURM_CONF": str(configuration)}

    def scontrol(text: str) -> list[str] | None:
        done = subprocess.run(
            ["scontrol", "--", "show", "hostnames", text], env=environ, capture_output=True, check=False
        )
        if done.stderr or done.returncode < 0:  # it prints the refusal and exits 0; some texts crash it
            return None
        return [line for line in done.stdout.decode("utf-8", "surrogateescape").split("\n") if line]

    generator = random.Random(20)
    texts = [_generated(generator) for _ in range(count)]
    different: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for text, expected in zip(texts, pool.map(scontrol, texts), strict=True):
            hosts: list[str] | None
            try:
                hosts = expand_nodelist(text)
            except NodelistError as refusal:
                # the one declared difference: scontrol makes up a host for a group that is never closed
                hosts = expected if "not closed" in str(refusal) else None
            if hosts != expected:
                different.append(text)
    configuration.unlink()
    return {"texts": count, "different": len(different), "first": different[0] if different else ""}


if __name__ == "__main__":
    number = int(sys.argv[2])
    print(json.dumps(take_times(number) if sys.argv[1] == "time" else compare(number)))
