"""From one task's variables to its workers' ranks: layouts worked out by hand, and the field reports by their ids."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc.errors import EnvironmentMismatch, NodelistError
from hpc.node import environment
from hpc.ranks import RankInfo

ROOT = Path(__file__).parent.parent

TASKENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


def taskenv(**changes: str | int | None) -> dict[str, str]:
    """TASKENV with changes; None takes a variable away. NODELIST sets both lists, NODES both counts of nodes."""
    environ = dict(TASKENV)
    if "NODELIST" in changes:
        hosts = changes.pop("NODELIST")
        changes |= {"SLURM_JOB_NODELIST": hosts, "SLURM_STEP_NODELIST": hosts}
    if "NODES" in changes:
        nodes = changes.pop("NODES")
        changes |= {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = str(value)
    return environ


def task_per_node(node: int = 0, nodes: int = 2, gpus: int = 4, **changes: str | int | None) -> dict[str, str]:
    """One task on each of `nodes` nodes."""
    settings: dict[str, str | int | None] = {
        "SLURM_PROCID": node,
        "SLURM_NODEID": node,
        "SLURM_NTASKS": nodes,
        "NODES": nodes,
        "SLURM_NTASKS_PER_NODE": 1,
        "SLURM_TASKS_PER_NODE": f"1(x{nodes})" if nodes > 1 else "1",
        "NODELIST": f"gpu[1-{nodes}]",
        "SLURM_GPUS_ON_NODE": gpus or None,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))) if gpus else None,
    }
    return taskenv(**{**settings, **changes})


def door(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m hpc.node` in exactly this environment, with no Slurm program on PATH."""
    return subprocess.run(
        [sys.executable, "-m", "hpc.node", *arguments],
        env={"PATH": "/nonexistent", "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def shown(environ: Mapping[str, str], *arguments: str) -> list[dict[str, str]]:
    """What --show prints, a mapping per worker."""
    done = door(environ, "--show", *arguments)
    assert done.returncode == 0, done.stderr
    blocks = done.stdout.strip().split("\n\n")
    return [dict(line.split("=", 1) for line in block.splitlines()) for block in blocks]


def refused(environ: Mapping[str, str], *texts: str) -> None:
    """The door refuses with exit code 78, one line, and all of these texts in it."""
    done = door(environ, "--show")
    assert done.returncode == 78, done.stderr + done.stdout
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    for text in texts:
        assert text in done.stderr


def places(environ: Mapping[str, str], **request: int | str) -> list[tuple[int, int, int, int, int, int | None]]:
    """(rank, local rank, node rank, world size, local world size, device) of this task's workers."""
    task = environment.read(environ, **request)
    return [
        (info.rank, info.local_rank, info.node_rank, info.world_size, info.local_world_size, info.device_index)
        for info in environment.rank_infos(task)
    ]


# ---- layouts, by hand -------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("task per GPU, first", taskenv(), [(0, 0, 0, 8, 4, 0)]),
    (
        "task per GPU, last",
        taskenv(SLURM_PROCID=7, SLURM_LOCALID=3, SLURM_NODEID=1),
        [(7, 3, 1, 8, 4, 3)],
    ),
    ("task per node, first", task_per_node(0), [(rank, rank, 0, 8, 4, rank) for rank in range(4)]),
    ("task per node, second", task_per_node(1), [(4 + rank, rank, 1, 8, 4, rank) for rank in range(4)]),
    ("task per node, no GPU", task_per_node(1, gpus=0), [(1, 0, 1, 2, 1, None)]),
    ("task per node, one GPU", task_per_node(1, gpus=1), [(1, 0, 1, 2, 1, 0)]),
    (
        "GPUs 2 and 3 of a shared node",
        task_per_node(0, 1, 2, CUDA_VISIBLE_DEVICES="2,3"),
        [(0, 0, 0, 2, 2, 0), (1, 1, 0, 2, 2, 1)],
    ),
    (
        "GPUs by their UUIDs",
        task_per_node(0, 1, 2, CUDA_VISIBLE_DEVICES="GPU-8a2,GPU-01f"),
        [(0, 0, 0, 2, 2, 0), (1, 1, 0, 2, 2, 1)],
    ),
    (
        "CUDA_VISIBLE_DEVICES unset, GPUs told by Slurm",
        task_per_node(0, 1, 2, CUDA_VISIBLE_DEVICES=None),
        [(0, 0, 0, 2, 2, 0), (1, 1, 0, 2, 2, 1)],
    ),
    (
        "only SLURM_STEP_GPUS",
        task_per_node(0, 1, 2, CUDA_VISIBLE_DEVICES=None, SLURM_GPUS_ON_NODE=None, SLURM_STEP_GPUS="2,3"),
        [(0, 0, 0, 2, 2, 0), (1, 1, 0, 2, 2, 1)],
    ),
    (
        "no device files",
        task_per_node(0, 1, CUDA_VISIBLE_DEVICES="NoDevFiles", SLURM_GPUS_ON_NODE=0),
        [(0, 0, 0, 1, 1, None)],
    ),
    (
        "uneven: tasks 2,1 and this the last",
        taskenv(
            SLURM_NTASKS=3,
            SLURM_STEP_NUM_TASKS=3,
            SLURM_STEP_TASKS_PER_NODE="2,1",
            SLURM_TASKS_PER_NODE="2,1",
            SLURM_NTASKS_PER_NODE=None,
            SLURM_PROCID=2,
            SLURM_NODEID=1,
            SLURM_GPUS_ON_NODE=2,
            CUDA_VISIBLE_DEVICES="0,1",
        ),
        [(2, 0, 1, 3, 1, 0)],
    ),
    (
        "a step smaller than its job, as Slurm 22.05 tells it",
        taskenv(
            SLURM_STEP_NUM_TASKS=2,
            SLURM_NTASKS=2,
            SLURM_STEP_NUM_NODES=1,
            SLURM_NNODES=1,
            SLURM_STEP_TASKS_PER_NODE="2",
            SLURM_TASKS_PER_NODE="2",
            SLURM_STEP_NODELIST="gpu2",
            SLURM_PROCID=1,
            SLURM_LOCALID=1,
        ),
        [(1, 1, 0, 2, 2, 1)],
    ),
    (
        "a step smaller than its job, the job's counts left",
        taskenv(
            SLURM_STEP_NUM_TASKS=1, SLURM_STEP_NUM_NODES=1, SLURM_STEP_TASKS_PER_NODE="1", SLURM_STEP_NODELIST="gpu2"
        ),
        [(rank, rank, 0, 4, 4, rank) for rank in range(4)],
    ),
    (
        "srun -m cyclic: the second task is the first of node 1",
        taskenv(SLURM_PROCID=1, SLURM_NODEID=1, SLURM_LOCALID=0, SLURM_DISTRIBUTION="cyclic"),
        [(1, 0, 1, 8, 4, 0)],
    ),
    (
        "a component of a heterogeneous job, with the step's own variables",
        taskenv(
            SLURM_HET_SIZE=2,
            SLURM_STEP_NUM_TASKS=3,
            SLURM_STEP_TASKS_PER_NODE="1,2",
            SLURM_PROCID=2,
            SLURM_NODEID=1,
            SLURM_LOCALID=1,
        ),
        [(2, 1, 1, 3, 2, 1)],
    ),
]


@pytest.mark.parametrize(("environ", "expected"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_layouts(environ: dict[str, str], expected: list[tuple[int, ...]]) -> None:
    assert places(environ) == expected


def test_all_tasks_of_a_step_cover_the_ranks_once() -> None:
    for environs in (
        [taskenv(SLURM_PROCID=p, SLURM_LOCALID=p % 4, SLURM_NODEID=p // 4) for p in range(8)],
        [task_per_node(node) for node in range(2)],
    ):
        workers = [place for environ in environs for place in places(environ)]
        assert [place[0] for place in workers] == list(range(8))
        assert [place[1] for place in workers] == [0, 1, 2, 3] * 2


def test_nodes_with_different_gpu_counts_are_counted_when_the_agents_have_met() -> None:
    second = environment.read(task_per_node(1, gpus=2))
    infos = environment.rank_infos(second, [4, 2])
    assert [(info.rank, info.local_rank, info.world_size, info.local_world_size) for info in infos] == [
        (4, 0, 6, 2),
        (5, 1, 6, 2),
    ]
    assert isinstance(infos[0], RankInfo)
    with pytest.raises(EnvironmentMismatch, match="3 tasks"):
        environment.rank_infos(second, [4, 2, 2])


def test_the_request_decides_the_workers_of_a_task() -> None:
    assert len(places(task_per_node(0), workers_per_node=2)) == 2
    assert len(places(task_per_node(0, gpus=0), workers_per_node=3)) == 3
    assert len(places(task_per_node(0), layout="task-per-gpu")) == 1
    assert len(places({}, workers_per_node=2)) == 2
    with pytest.raises(EnvironmentMismatch, match="5 workers.*4 visible GPUs"):
        environment.read(task_per_node(0), workers_per_node=5)
    with pytest.raises(EnvironmentMismatch, match="2 workers.*1 visible GPUs"):
        environment.read(task_per_node(0, gpus=1), workers_per_node=2)
    with pytest.raises(EnvironmentMismatch, match="--workers-per-node=2, but 4 tasks"):
        environment.read(taskenv(), workers_per_node=2)
    with pytest.raises(EnvironmentMismatch, match="task-per-node, but 4 tasks"):
        environment.read(taskenv(), layout="task-per-node")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"SLURM_NODEID": "2"}, ("SLURM_NODEID=2", "2 nodes")),
        ({"SLURM_PROCID": "8"}, ("SLURM_PROCID=8", "8 tasks")),
        ({"SLURM_LOCALID": "4"}, ("SLURM_LOCALID=4", "4 tasks")),
        ({"SLURM_PROCID": "-1"}, ("SLURM_PROCID='-1'", "not a number")),
        ({"SLURM_PROCID": "x"}, ("SLURM_PROCID='x'",)),
        ({"SLURM_PROCID": None}, ("SLURM_PROCID is not set",)),
        ({"SLURM_NTASKS": "9"}, ("SLURM_NTASKS=9", "SLURM_TASKS_PER_NODE=4(x2)")),
        ({"SLURM_TASKS_PER_NODE": "4(x3)"}, ("SLURM_NNODES=2", "4(x3)")),
        ({"SLURM_TASKS_PER_NODE": "four"}, ("SLURM_TASKS_PER_NODE='four'",)),
        ({"SLURM_NTASKS": "0"}, ("SLURM_NTASKS=0",)),
        ({"NODELIST": "gpu[1-3]"}, ("3 hosts", "2 nodes")),
        ({"NODELIST": None}, ("no host list", "SLURM_JOB_NODELIST", "MASTER_ADDR")),
        ({"SLURM_DISTRIBUTION": "block", "SLURM_PROCID": "5"}, ("SLURM_PROCID=5", "SLURM_NODEID=0")),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ("arbitrary", "MASTER_ADDR")),
        ({"NODELIST": "gpu[1-2],$(reboot)"}, ("$(reboot)",)),
        ({"MASTER_ADDR": "scontrol: not found"}, ("MASTER_ADDR='scontrol: not found'",)),
        ({"MASTER_PORT": "70000"}, ("MASTER_PORT='70000'",)),
        ({"MASTER_PORT": "http"}, ("MASTER_PORT='http'",)),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_contradicts_itself_is_refused_with_both_values(
    changes: dict[str, str | None], texts: tuple[str, ...]
) -> None:
    with pytest.raises(EnvironmentMismatch) as refusal:
        environment.read(taskenv(**changes))
    for text in texts:
        assert text in str(refusal.value)


def test_a_preset_master_and_port_are_kept() -> None:
    task = environment.read(taskenv(MASTER_ADDR="10.0.0.9", MASTER_PORT=29500))
    assert (task.master_host, task.preset_port) == ("10.0.0.9", 29500)
    assert environment.read(taskenv(MASTER_ADDR="fe80::1%eth0")).master_host == "fe80::1%eth0"
    assert environment.read(taskenv(MASTER_ADDR="", MASTER_PORT="")).master_host == "gpu1"


def test_one_node_meets_on_loopback() -> None:
    assert environment.read(task_per_node(0, 1)).master_host == "127.0.0.1"


def test_without_a_job_this_process_is_alone() -> None:
    task = environment.read({"CUDA_VISIBLE_DEVICES": "3"})
    assert not task.in_step and task.notes == () and task.hosts == ("localhost",)
    assert places({"CUDA_VISIBLE_DEVICES": "3"}) == [(0, 0, 0, 1, 1, 0)]
    assert places({}) == [(0, 0, 0, 1, 1, None)]


@pytest.mark.parametrize("step", ["4294967291", "4294967290", "4294967292", None, "", "batch"])
def test_the_batch_script_and_an_interactive_shell_are_no_step(step: str | None) -> None:
    assert not environment.read(taskenv(SLURM_STEP_ID=step)).in_step
    assert environment.is_in_step(taskenv(SLURM_STEP_ID=step), controlled=True)


def test_array_restart_and_step_are_read() -> None:
    task = environment.read(taskenv(SLURM_ARRAY_TASK_ID=3, SLURM_RESTART_COUNT=2))
    assert (task.job_id, task.array_index, task.restart_count, task.step_id) == ("7", "3", 2, "0")
    first = shown(taskenv())[0]["MASTER_PORT"]
    ports = {first}
    for changes in ({"SLURM_JOB_ID": 8}, {"SLURM_ARRAY_TASK_ID": 3}, {"SLURM_RESTART_COUNT": 1}):
        ports.add(shown(taskenv(**changes))[0]["MASTER_PORT"])
    assert len(ports) == 4
    assert shown(taskenv(SLURM_PROCID=5, SLURM_NODEID=1, SLURM_LOCALID=1))[0]["MASTER_PORT"] == first


# ---- the field reports ------------------------------------------------------------------------------------------------


def test_r01_a_comma_inside_brackets() -> None:
    (worker,) = shown(taskenv(NODELIST="gpu[1,2]"))
    assert (worker["MASTER_ADDR"], worker["WORLD_SIZE"]) == ("gpu1", "8")


def test_r02_leading_zeros_stay() -> None:
    environ = taskenv(NODELIST="node[008-011]", NODES=4, SLURM_NTASKS=16, SLURM_TASKS_PER_NODE="4(x4)")
    assert environment.read(environ).hosts == ("node008", "node009", "node010", "node011")
    assert shown(environ)[0]["MASTER_ADDR"] == "node008"


def test_r05_numbers_and_ranges_mixed() -> None:
    environ = taskenv(NODELIST="host[001,003-004,006]", NODES=4, SLURM_NTASKS=16, SLURM_TASKS_PER_NODE="4(x4)")
    assert environment.read(environ).hosts == ("host001", "host003", "host004", "host006")


@pytest.mark.parametrize("text", ["gpu[1-", "gpu[4-2]"])
def test_r07_an_unreadable_list_is_quoted_and_master_addr_helps(text: str) -> None:
    refused(taskenv(NODELIST=text), repr(text), "MASTER_ADDR")
    refused(taskenv(SLURM_JOB_NODELIST=text), repr(text), "MASTER_ADDR")
    with pytest.raises(NodelistError):
        environment.read(taskenv(NODELIST=text))
    (worker,) = shown(taskenv(NODELIST=text, MASTER_ADDR="gpu1"))
    assert (worker["MASTER_ADDR"], worker["WORLD_SIZE"]) == ("gpu1", "8")


def test_r08_the_repeat_notation_of_counts() -> None:
    (worker,) = shown(taskenv(SLURM_NTASKS_PER_NODE=None))
    assert worker["LOCAL_WORLD_SIZE"] == "4"


def test_r10_tasks_counted_from_the_nodes() -> None:
    assert shown(taskenv(SLURM_NTASKS=None))[0]["WORLD_SIZE"] == "8"
    assert shown(taskenv(SLURM_NTASKS=None, SLURM_TASKS_PER_NODE=None))[0]["WORLD_SIZE"] == "8"
    refused(
        taskenv(SLURM_NTASKS=None, SLURM_TASKS_PER_NODE=None, SLURM_NTASKS_PER_NODE=None),
        "SLURM_NTASKS is not set",
        "#SBATCH --ntasks-per-node",
    )


@pytest.mark.parametrize("listed", ["1", "2", None])
def test_r11_one_task_in_all_and_two_per_node(listed: str | None) -> None:
    refused(
        taskenv(
            SLURM_NTASKS=1,
            SLURM_NTASKS_PER_NODE=2,
            NODES=1,
            SLURM_TASKS_PER_NODE=listed,
            NODELIST="gpu1",
            SLURM_GPUS_ON_NODE=2,
            CUDA_VISIBLE_DEVICES="0,1",
        ),
        "SLURM_NTASKS=1",
        "SLURM_NTASKS_PER_NODE=2",
        "leave --ntasks out",
    )


def test_r12_two_nodes_of_two_are_no_reason_to_warn() -> None:
    environ = taskenv(
        SLURM_NTASKS=4,
        SLURM_NTASKS_PER_NODE=2,
        SLURM_TASKS_PER_NODE="2(x2)",
        SLURM_GPUS_ON_NODE=2,
        CUDA_VISIBLE_DEVICES="0,1",
    )
    done = door(environ, "--show")
    assert (done.returncode, done.stderr) == (0, "")


def test_r13_the_local_world_size_is_not_the_number_of_nodes() -> None:
    assert shown(taskenv())[0]["LOCAL_WORLD_SIZE"] == "4"
    assert {worker["LOCAL_WORLD_SIZE"] for worker in shown(task_per_node(1))} == {"4"}


def test_r16_the_jobs_name_says_nothing() -> None:
    environ = taskenv(
        SLURM_JOB_NAME="interactive",
        SLURM_PROCID=1,
        SLURM_LOCALID=1,
        SLURM_NTASKS=2,
        NODES=1,
        NODELIST="gpu1",
        SLURM_NTASKS_PER_NODE=2,
        SLURM_TASKS_PER_NODE="2",
        SLURM_GPUS_ON_NODE=2,
        CUDA_VISIBLE_DEVICES="0,1",
    )
    done = door(environ, "--show")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nWORLD_SIZE=2\n" in done.stdout and done.stdout.startswith("RANK=1\n")


def test_r17_no_step_means_alone_and_says_so() -> None:
    done = door({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "bash"}, "--show")
    assert done.returncode == 0
    assert "\nWORLD_SIZE=1\n" in done.stdout
    assert "hpc.node: note: SLURM_JOB_ID=7" in done.stderr and "alone" in done.stderr


def test_s10_the_variables_of_another_jobs_batch_script_are_ignored() -> None:
    done = door(taskenv(SLURM_STEP_ID=None), "--show")
    assert done.returncode == 0
    assert "\nWORLD_SIZE=1\n" in done.stdout and "MASTER_ADDR=127.0.0.1\n" in done.stdout
    assert "ignored" in done.stderr


def test_r18_x10_one_visible_gpu_is_number_0_and_says_so() -> None:
    environ = taskenv(SLURM_LOCALID=3, SLURM_PROCID=3, CUDA_VISIBLE_DEVICES="0")
    done = door(environ, "--show")
    assert done.returncode == 0
    assert "\nDEVICE_INDEX=0\n" in done.stdout and "\nLOCAL_RANK=3\n" in done.stdout
    assert "device index 0" in done.stderr
    assert "warning: NCCL" in done.stderr and "--gpus-per-node" in done.stderr


@pytest.mark.parametrize("visible", ["0,1,2,3", None])
def test_r20_more_tasks_than_gpus(visible: str | None) -> None:
    environ = taskenv(
        SLURM_NTASKS=16, SLURM_NTASKS_PER_NODE=8, SLURM_TASKS_PER_NODE="8(x2)", CUDA_VISIBLE_DEVICES=visible
    )
    refused(environ, "8 tasks", "4 visible GPUs", "--ntasks-per-node=4")


def test_r21_one_worker_per_task_whatever_is_visible() -> None:
    for visible in ("0", "0,1,2,3"):
        workers = []
        for local in range(4):
            workers += shown(
                taskenv(
                    SLURM_NTASKS=4,
                    NODES=1,
                    NODELIST="gpu1",
                    SLURM_TASKS_PER_NODE="4",
                    SLURM_PROCID=local,
                    SLURM_LOCALID=local,
                    CUDA_VISIBLE_DEVICES=str(local) if visible == "0" else visible,
                )
            )
        assert [worker["RANK"] for worker in workers] == ["0", "1", "2", "3"]
        assert {worker["WORLD_SIZE"] for worker in workers} == {"4"}


def test_r23_visible_devices_stay_and_a_mismatch_is_told() -> None:
    environ = task_per_node(0, CUDA_VISIBLE_DEVICES="2,3", SLURM_GPUS_ON_NODE=4)
    done = door(environ, "--show")
    assert done.stdout.count("CUDA_VISIBLE_DEVICES=2,3") == 2
    assert "CUDA_VISIBLE_DEVICES=2,3" in done.stderr and "SLURM_GPUS_ON_NODE=4" in done.stderr
    assert door(task_per_node(0), "--show").stderr == ""


def test_r24_a_component_without_its_own_variables_is_refused() -> None:
    refused(
        taskenv(
            NODELIST=None,
            SLURM_HET_SIZE=2,
            SLURM_JOB_NODELIST_HET_GROUP_0="a[1-2]",
            SLURM_JOB_NODELIST_HET_GROUP_1="b1",
        ),
        "SLURM_HET_SIZE=2",
        "heterogeneous jobs are not supported",
    )


def test_r25_no_slurm_program_is_needed_and_a_preset_master_stays() -> None:
    assert shown(taskenv())[0]["MASTER_ADDR"] == "gpu1"  # the door's PATH has no scontrol
    assert shown(taskenv(MASTER_ADDR="gpu2"))[0]["MASTER_ADDR"] == "gpu2"


def test_r26_rank_is_mapped_from_procid() -> None:
    (worker,) = shown(taskenv(SLURM_PROCID=5, SLURM_LOCALID=1, SLURM_NODEID=1))
    assert (worker["RANK"], worker["LOCAL_RANK"], worker["GROUP_RANK"]) == ("5", "1", "1")


def test_l04_a_worker_does_not_start_workers() -> None:
    refused(taskenv(TORCHELASTIC_RUN_ID="none"), "TORCHELASTIC_RUN_ID=none", "one launcher")
    refused({"TORCHELASTIC_RUN_ID": "none"}, "one launcher")


def test_x05_preset_ranks_that_differ_are_refused_with_both_values() -> None:
    environ = taskenv(
        RANK=0,
        WORLD_SIZE=1,
        SLURM_PROCID=3,
        SLURM_LOCALID=3,
        SLURM_NTASKS=4,
        NODES=1,
        NODELIST="gpu1",
        SLURM_TASKS_PER_NODE="4",
    )
    refused(environ, "RANK=0", "SLURM_PROCID=3", "RANK=3")
    refused({**environ, "RANK": "3"}, "WORLD_SIZE=1", "WORLD_SIZE=4")
    refused(taskenv(LOCAL_RANK=2), "LOCAL_RANK=2", "LOCAL_RANK=0")
    refused(taskenv(LOCAL_WORLD_SIZE=8), "LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=4")
    refused({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1", "RANK=0")
    refused(task_per_node(1, RANK=0, WORLD_SIZE=2), "RANK=0")


def test_x05_agreeing_values_pass_quietly_and_a_tasks_own_with_a_note() -> None:
    done = door(taskenv(RANK=0, WORLD_SIZE=8, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4), "--show")
    assert (done.returncode, done.stderr) == (0, "")
    done = door(task_per_node(1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=0), "--show")
    assert done.returncode == 0 and "they describe this task" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("RANK=")] == [
        f"RANK={r}" for r in (4, 5, 6, 7)
    ]
    done = door(task_per_node(1, WORLD_SIZE=8), "--show")
    assert (done.returncode, done.stderr) == (0, "")


# ---- the door ---------------------------------------------------------------------------------------------------------


def test_showing_needs_neither_torch_nor_omegaconf() -> None:
    program = (
        "import sys; from hpc.node.__main__ import main; code = main(['--show']); "
        "sys.exit(code or 9 * bool({'torch', 'omegaconf', 'hpc.node.agent'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT), **taskenv()}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_workers_are_parted_by_an_empty_line() -> None:
    done = door(task_per_node(0), "--show")
    assert done.stdout.count("\n\n") == 3
    assert [worker["DEVICE_INDEX"] for worker in shown(task_per_node(0))] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--layout", "per-node"], "--layout"),
        (["--workers-per-node", "0"], "--workers-per-node"),
        (["--workers-per-node", "two"], "--workers-per-node"),
        (["--rendezvous-timeout", "-1"], "--rendezvous-timeout"),
        (["--sho"], "--sho"),
        (["jobs.digits", "jobs.gpt"], "jobs.gpt"),
        (["train.py"], "-- train.py"),
        (["--"], "nothing follows --"),
        (["jobs.digits", "--", "train.py"], "jobs.digits"),
    ],
)
def test_a_wrong_command_line_is_refused_with_2(arguments: list[str], text: str) -> None:
    done = door(taskenv(), *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("hpc.node: error: ") and done.stderr.count("\n") == 1
    assert text in done.stderr
