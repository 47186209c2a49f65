"""A check of an allocation: real tasks of one machine that stand for nodes, started by a stand-in for srun; what figures mean."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from submit_shell import ROOT, STUBS

from hpc import ledger, lines
from hpc.allocation import fitness
from hpc.allocation.fitness import Checked
from hpc.node import checkup, gpuhealth

NODES = ("127.0.0.1", "127.0.0.2")


def doctor(folder: Path, *words: str, hosts: str = ",".join(NODES), **environ: str) -> subprocess.CompletedProcess[str]:
    nodes = hosts.count(",") + 1
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPC_"))}
    env = {
        **kept,
        "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HPC_SITE_CONFIG": "",
        "XDG_STATE_HOME": str(folder / "state"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": hosts,
        "FAKE_SLURM_LOG": str(folder / "log"),
        **environ,
    }
    argv = [sys.executable, "-m", "hpc.doctor", "--allocation", *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_fit_nodes_in_a_table_and_nothing_is_left(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    assert [words[0] for words in table if words[0] in NODES] == list(NODES)
    assert done.stdout.count(" 1 of 1 ") == 4 and done.stdout.endswith("all nodes are fit\n"), done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "log.srun", "state"}


@pytest.mark.slow
def test_x14_a_node_that_says_nothing_is_named_in_time_and_remembered(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = 127.0.0.2 ] && exec sleep 60\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    began = time.monotonic()
    done = doctor(tmp_path, "--quick", "--limit", "30", "--remember", f"launch.python={python}", SLURM_CLUSTER_NAME="c")
    assert done.returncode == 1 and time.monotonic() - began < 90
    assert "127.0.0.2: it did not start its task" in done.stdout and "\n127.0.0.1: " not in done.stdout, done.stdout
    assert "remembered" in done.stdout
    text = (tmp_path / "state" / "hpc" / "failed-nodes.jsonl").read_text()
    assert '"node": "127.0.0.2"' in text and '"cluster": "c"' in text and text.count("\n") == 1


def test_a_name_that_does_not_resolve_is_named(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--quick", hosts="127.0.0.1,nowhere.invalid,127.0.0.3")
    assert done.returncode == 1, done.stdout
    for node in ("127.0.0.1", "127.0.0.3"):
        assert f"nowhere.invalid: {node} cannot reach it: the name nowhere.invalid does not resolve" in done.stdout
    assert "--exclude=nowhere.invalid," in done.stdout and "2 of 2" in done.stdout


def test_what_all_nodes_have_is_no_reason_to_leave_one_out(tmp_path: Path) -> None:
    python = tmp_path / "python"
    hidden = f"{sys.executable} -c \"import sys; sys.argv[1:] = [*sys.argv[1:], '--folder=/proc'];"
    python.write_text(
        f'#!/bin/sh\nshift 3\nexec {hidden} from hpc.node.checkup import main; import os; os._exit(main())" "$@"\n'
    )
    python.chmod(0o755)
    done = doctor(tmp_path, "--quick", "--remember", f"launch.python={python}")
    assert done.returncode == 1 and done.stdout.count("it cannot write /proc") == 2, done.stdout + done.stderr
    assert "the cause lies elsewhere" in done.stdout and not (tmp_path / "state").exists()


def test_x16_a_step_that_slurm_refuses_is_no_fault_of_the_nodes(tmp_path: Path) -> None:
    done = doctor(tmp_path, FAKE_SRUN_EXIT="1", FAKE_SRUN_STDERR="srun: error: Unable to create step for job 7")
    assert done.returncode == 1 and "never started on any node" in done.stdout and "--exclude" not in done.stdout
    assert "Unable to create step" in done.stderr


def test_outside_of_an_allocation_it_says_how_to_get_one(tmp_path: Path) -> None:
    done = doctor(tmp_path, SLURM_JOB_ID="")
    assert done.returncode == 2 and "salloc" in done.stderr and done.stderr.count("\n") == 1


# ---- what figures mean -----------------------------------------------------------------------------------------------


def told(**more: Any) -> dict[str, Any]:
    return {
        "host": "n", "address": "10.0.0.1", "loopback": False, "gpus": [], "gpus_unknown": "", "gpus_given": 4,
        "shm_free": 1 << 34, "tmp_free": 1 << 34, "folder_free": 1 << 34, "folder_there": True, "mib_per_s": 90.0, **more,
    }  # fmt: skip


def checked(faults: dict[str, dict[str, Any]] | None = None, nodes: int = 3, **more: Any) -> Checked:
    """Nodes without a fault, but for what is said."""
    names = tuple(f"n{number + 1}" for number in range(nodes))
    good = {"address": "10.0.0.1", "ms": 0.2, "ahead_s": 0.0}
    found = Checked(nodes=names, gpus_asked=4, **more)
    for name in names:
        found.told[name] = told(
            reach={peer: good for peer in names if peer != name},
            seen={peer: {"s": 0.0} for peer in names if peer != name},
        )
        found.told[name].update((faults or {}).get(name, {}))
    return found


GOOD, BAD = {"address": "10.0.0.1", "ms": 0.2, "ahead_s": 0.0}, {"error": "10.0.0.2, port 9: No route to host"}
FAULTS = [
    ("/dev/shm has 1 MiB free", True, {"n2": {"shm_free": 1 << 20}}),
    ("/dev/shm has none free", True, {"n2": {"shm_free": None}}),
    ("temporary files has 0 MiB", True, {"n2": {"tmp_free": 1000}}),
    ("shared folder of the run is not there", True, {"n2": {"folder_there": False}}),
    ("shared file system has", False, {"n2": {"folder_free": 1 << 20}}),
    ("resolves to 127.0.1.1", False, {"n2": {"loopback": True, "address": "127.0.1.1"}}),
    ("does not resolve", False, {"n2": {"address": ""}}),
    ("3 GPUs of 4 were given", True, {"n2": {"gpus_given": 3}}),
    ("the driver shows 3 GPUs of 4", True, {"n2": {"gpus": [{"name": "A100", "faults": []}] * 3}}),
    ("12 uncorrected ECC", True, {"n2": {"gpus": [{"name": "A", "faults": ["GPU 0: 12 uncorrected ECC errors"]}] * 4}}),
    ("does not answer", True, {"n2": {"gpus_unknown": "the NVIDIA driver does not answer: GPU is lost"}}),
    ("cannot write /shared: Disk quota exceeded", True, {"n2": {"write_error": "/shared: Disk quota exceeded"}}),
    ("n1 cannot reach it", True, {"n1": {"reach": {"n2": BAD, "n3": GOOD}}, "n3": {"reach": {"n2": BAD, "n1": GOOD}}, "n2": {"reach": {"n1": BAD, "n3": BAD}}}),
    ("its clock is 5.0 s ahead of", False, {"n1": {"reach": {"n2": {**GOOD, "ahead_s": 5.0}, "n3": GOOD}}, "n3": {"reach": {"n2": {**GOOD, "ahead_s": 5.0}, "n1": GOOD}}, "n2": {"reach": {}}}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "unfit", "faults"), FAULTS, ids=[row[0] for row in FAULTS])
def test_what_is_wrong_with_a_node_is_said_of_that_node(what: str, unfit: bool, faults: dict[str, Any]) -> None:
    assert fitness.judge(checked()) == []
    found = checked(faults)
    findings = fitness.judge(found)
    assert {finding.node for finding in findings} <= {"n2", "n1", "n3"} and any(
        finding.node == "n2" and what in finding.what and finding.unfit == unfit for finding in findings
    ), findings
    assert list(fitness.unfit(findings)) == (["n2"] if unfit else [])
    assert len(fitness.rows(found)) == 3


def test_a_slow_node_is_named_and_a_slow_pair_is_not_guessed_at() -> None:
    def rank(node: str, number: int, speed: float, **more: Any) -> dict[str, Any]:
        figures = {"tflop_s": speed, "copy_gb_s": 20.0, "node_gb_s": 100.0, "same": True}
        return {
            "rank": number,
            "local_rank": number % 2,
            "host": f"{node}.cluster",
            "device": "cuda",
            **figures,
            **more,
        }

    even = [rank(f"n{n // 2 + 1}", n, 300.0 + n) for n in range(6)]
    assert fitness.judge(checked(ranks=even)) == []
    slow = [*even[:3], rank("n2", 3, 120.0), *even[4:]]
    (finding,) = fitness.judge(checked(ranks=slow))
    assert finding.node == "n2" and "slow: it multiplies at 120, the others at 302 TFLOP/s" in finding.what
    (finding,) = fitness.judge(checked(ranks=[*even[:5], rank("n3", 5, 305.0, same=False)]))
    assert finding.node == "n3" and "GPU 1 gives other products" in finding.what
    cut = {"n1": {"reach": {"n2": BAD, "n3": GOOD}}}
    (finding,) = fitness.judge(checked(cut))
    assert finding.node == "n1" and "cannot reach n2" in finding.what


# ---- messages in lines -----------------------------------------------------------------------------------------------


def test_messages_of_many_senders_come_whole_through_torn_and_labelled_lines() -> None:
    chance = random.Random(3)
    messages = {f"n{n}": {"text": 'ä"\n' * chance.randrange(2000), "n": n} for n in range(20)}
    waiting = [
        [f"{n}: [rank 0] ".encode() + line for line in lines.pieces(n, m).splitlines(True)] for n, m in messages.items()
    ]
    collector, found = lines.Collector(), {}
    while any(waiting):
        queue = chance.choice([queue for queue in waiting if queue])
        line = queue.pop(0)
        assert len(line) < 1024
        for junk in (b"hpc-message", b"hpc-message n1 1/99999 {}", b"\xff hpc-message n1", b"other"):
            assert collector.add(junk) is None
        if (message := collector.add(line)) is not None:
            found[f"n{message['n']}"] = message
    assert found == messages
    assert lines.Collector().add(b"hpc-message n1 2/2 {}") is None and ledger.clock() > 0


def test_very_many_nodes_each_call_some_and_all_are_called() -> None:
    few = [f"n{n}" for n in range(5)]
    assert checkup.next_to("n2", few) == ["n0", "n1", "n3", "n4"]
    many = [f"n{n:04}" for n in range(1000)]
    called = Counter(peer for node in many for peer in checkup.next_to(node, many))
    assert set(called) == set(many) and set(called.values()) == {checkup.MANY}
    assert "n0000" in checkup.next_to("n0999", many) and "n0999" not in checkup.next_to("n0999", many)


# ---- what the driver knows -------------------------------------------------------------------------------------------


class Nvml(types.ModuleType):
    """As much of pynvml as is asked, for a driver that knows of these GPUs; None for no driver."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwThermalSlowdown, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x40, 0x80

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[dict[str, Any]] | None) -> None:
        super().__init__("pynvml")
        self.gpus = gpus

    def nvmlInit(self) -> None:
        if self.gpus is None:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus or [])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        gpu = (self.gpus or [])[index]
        if gpu.get("lost"):
            raise self.NVMLError("GPU is lost")
        return gpu

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> bytes:
        return b"NVIDIA H100"

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict[str, Any], kind: int, since: int) -> int:
        assert (kind, since) == (1, 0)
        return self._of(gpu, "ecc")

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: dict[str, Any]) -> int:
        return self._of(gpu, "retired")

    def nvmlDeviceGetRemappedRows(self, gpu: dict[str, Any]) -> tuple[int, int, int, int]:
        return 0, 0, self._of(gpu, "pending"), self._of(gpu, "failed")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: dict[str, Any]) -> int:
        return self._of(gpu, "slowed")

    def _of(self, gpu: dict[str, Any], name: str) -> int:
        if gpu.get("silent"):
            raise self.NVMLError("Not Supported")
        return int(gpu.get(name, 0))


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({}, []),
        ({"silent": True}, []),
        ({"lost": True}, ["GPU 1 cannot be asked: GPU is lost"]),
        ({"ecc": 3}, ["GPU 1: 3 uncorrected ECC errors since the driver was loaded"]),
        ({"retired": 1}, ["GPU 1: memory pages wait to be retired (a reset of the GPU is due)"]),
        ({"failed": 1}, ["GPU 1: memory rows could not be remapped (the GPU is to be replaced)"]),
        ({"pending": 1}, ["GPU 1: memory rows wait to be remapped (a reset of the GPU is due)"]),
        ({"slowed": 0x41}, ["GPU 1: slowed down by heat"]),
    ],
)
def test_what_the_driver_holds_against_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], said: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([{}, gpu]))
    gpus, why_not = gpuhealth.ask()
    assert (gpus[0]["faults"], gpus[1]["faults"], why_not) == ([], said, "")


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(None))
    assert gpuhealth.ask() == ([], "no NVIDIA driver to ask: NVML Shared Library Not Found")
