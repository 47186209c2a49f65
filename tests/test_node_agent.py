"""The agent with real workers: what they get, how they end together, and what is left (nothing)."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from steps import JOB, ROOT, Step, send, step_environ

from hpc.node import processes
from hpc.node.rendezvous import candidate_ports

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS",
         "HPC_SECRET", "DEVICE_INDEX", "HPC_CORES", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
seen = {name: os.environ.get(name) for name in names}
seen |= {"argv": sys.argv[1:], "name": __name__, "file": __file__, "path0": sys.path[0], "sid": os.getsid(0) == os.getpid(),
         "cores": sorted(os.sched_getaffinity(0)), "main": sys.modules["__main__"].__dict__ is globals()}
with open(f"seen-{os.environ['RANK']}.json", "w") as stream:
    json.dump(seen, stream)
"""

TRAIN = """
import os, sys, time, subprocess, signal
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("rank", rank, "ready at", os.environ["MASTER_PORT"], flush=True)
if "child" in sys.argv:  # a child that leaves its session, and one whose parent ends at once
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "sleep 301 & exit 0"], start_new_session=True).wait()
for step in range(int(os.environ.get("STEPS", "3"))):
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()
    if step == 1:
        if f"raise{rank}" in sys.argv:
            raise ValueError("bad batch 17")
        if f"exit{rank}" in sys.argv:
            sys.exit(3)
        if f"kill{rank}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"segv{rank}" in sys.argv:
            os.kill(os.getpid(), signal.SIGSEGV)
    if "sleep" in sys.argv:
        time.sleep(0.05)
dist.destroy_process_group()
print("rank", rank, "done", flush=True)
"""


@pytest.fixture
def step(tmp_path: Path):
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "train.py").write_text(TRAIN)
    with Step(tmp_path) as step:
        yield step


def seen(step: Step, rank: int) -> dict[str, object]:
    return json.loads((step.folder / f"seen-{rank}.json").read_text())


def run_dir_environ(step: Step, task: int = 0, **changes: object) -> dict[str, str]:
    """As the controller would start an agent: with a run directory and an attempt's folder."""
    (step.folder / "run" / "attempt-0").mkdir(parents=True, exist_ok=True)
    environ = step_environ(task, **changes)
    return {**environ, "HPC_RUN_DIR": str(step.folder / "run"), "HPC_ATTEMPT": "0", "HPC_SECRET": "s" * 32}


# ---- what a worker gets ----------------------------------------------------------------------------------------------


def test_a_script_gets_what_torchrun_would_give_it(step: Step) -> None:
    step.agent(step_environ(0, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "show.py", "--lr", "0.1", "a b")
    (ours,) = step.ends()
    assert ours.code == 0, ours.stderr
    mine = [seen(step, rank) for rank in range(2)]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**step_environ(0, tasks_per_node=(1,)), "OMP_NUM_THREADS": "1"}
    step.start([*argv, "show.py", "--lr", "0.1", "a b"], environ)
    assert step.ends()[1].code == 0, step.text(1)
    differing = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}  # a value of each launch
    added = {"DEVICE_INDEX", "HPC_CORES", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "cores"}
    for rank in range(2):
        theirs = seen(step, rank)
        assert set(theirs) == set(mine[rank])
        for name in set(theirs) - differing - added:
            assert mine[rank][name] == theirs[name], name
        assert all(mine[rank][name] for name in differing)
    assert mine[0]["MASTER_PORT"] == mine[1]["MASTER_PORT"]
    assert mine[0]["MASTER_ADDR"] == "127.0.0.1"
    assert mine[0]["name"] == "__main__" and mine[0]["main"] is True and mine[0]["sid"] is True


def test_r26_the_core_under_a_plain_srun_is_mapped_by_itself(step: Step) -> None:
    for task in range(2):
        argv = [sys.executable, "-m", "hpc.train", "jobs.digits", "train.max_steps=2", "run_dir=run"]
        step.start(argv, step_environ(task))
    ended = step.ends()
    assert [one.code for one in ended] == [0, 0], [one.stderr for one in ended]
    assert "2 ranks on cpu" in ended[0].stdout + ended[0].stderr


def test_secrets_of_the_meeting_do_not_reach_the_workers(step: Step) -> None:
    step.agent(run_dir_environ(step, tasks_per_node=(1,)), "--", "show.py")
    (ended,) = step.ends()
    assert ended.code == 0 and seen(step, 0)["HPC_SECRET"] is None
    texts = [path.read_text() for path in (step.folder / "run").rglob("*") if path.is_file()]
    assert not any("s" * 32 in text for text in texts)


def test_x02_compiler_caches_are_on_the_node_and_go_with_the_job_unless_the_user_chose(step: Step) -> None:
    environ = {**step_environ(0, tasks_per_node=(1,)), "TRITON_CACHE_DIR": "/chosen", "HOME": str(step.folder / "home")}
    temporary = step.folder / "tmp"
    temporary.mkdir()
    step.agent({**environ, "TMPDIR": str(temporary)}, "--", "show.py")
    (ended,) = step.ends()
    assert ended.code == 0
    assert seen(step, 0)["TRITON_CACHE_DIR"] == "/chosen"
    inductor = str(seen(step, 0)["TORCHINDUCTOR_CACHE_DIR"])
    assert inductor.startswith(f"{temporary}/hpc-")
    assert not list(temporary.iterdir()), "the agents' own import of torch leaves nothing either"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["-m", "tool.report", "x"], 0),
        ([sys.executable, "-m", "tool.report", "x"], 0),
        ([sys.executable, "-u", "show.py", "x"], 0),
        ([sys.executable, "-c", "raise SystemExit(5)"], 5),
        (["./binary", "x"], 7),
        (["sh", "-c", "exit $((10 + RANK))"], 10),
    ],
)
def test_modules_programs_and_their_exit_codes(step: Step, command: list[str], code: int) -> None:
    (step.folder / "tool").mkdir()
    (step.folder / "tool" / "report.py").write_text(
        "import sys\nassert sys.argv[1:] == ['x'] and __name__ == '__main__'\n"
    )
    binary = step.folder / "binary"
    binary.write_text('#!/bin/sh\n[ -n "$MASTER_PORT" ] && [ "$1" = x ] && exit 7\n')
    binary.chmod(0o755)
    step.agent(step_environ(0, tasks_per_node=(1,)), "--", *command)
    (ended,) = step.ends()
    assert ended.code == code, ended.stderr


@pytest.mark.parametrize("command", [["nothere.py"], ["./nothere"], ["show.txt"], ["torchrun", "train.py"], ["-m"]])
def test_a_command_that_cannot_run_is_refused_in_one_line(step: Step, command: list[str]) -> None:
    (step.folder / "show.txt").write_text("no program")
    step.agent(step_environ(0, tasks_per_node=(1,)), "--", *command)
    (ended,) = step.ends()
    assert ended.code == 2 and ended.stderr.count("\n") == 1 and command[0] in ended.stderr


def test_preloaded_modules_are_imported_once_and_seen_by_every_worker(step: Step) -> None:
    (step.folder / "heavy.py").write_text("import os\nwith open('imports', 'a') as s: s.write(f'{os.getpid()} ')\n")
    (step.folder / "use.py").write_text("import heavy, sys; assert 'torch' in sys.modules\n")
    environ = {**step_environ(0, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{step.folder}"}
    step.agent(environ, "--workers-per-node", "3", "--preload", "heavy", "--", "use.py")
    (ended,) = step.ends()
    assert ended.code == 0, ended.stderr
    assert len((step.folder / "imports").read_text().split()) == 1
    step.agent(environ, "--preload", "no_such_module", "--", "use.py")
    assert step.ends()[1].code == 69 and "no_such_module" in step.text(1)


def test_a_preload_that_starts_threads_falls_back_to_fresh_interpreters(step: Step) -> None:
    (step.folder / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True, name='busy').start()\n"
    )
    (step.folder / "use.py").write_text("import sys; assert 'torch' not in sys.modules\n")
    environ = {**step_environ(0, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{step.folder}"}
    step.agent(environ, "--preload", "busy", "--", "use.py")
    (ended,) = step.ends()
    assert ended.code == 0 and "busy" in ended.stderr and "fresh interpreters" in ended.stderr


def test_x08_cores_are_shared_out_and_threads_follow(step: Step) -> None:
    step.agent(step_environ(0, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "show.py")
    (ended,) = step.ends()
    assert ended.code == 0
    allowed = sorted(os.sched_getaffinity(0))
    shares = [seen(step, rank)["cores"] for rank in range(2)]
    if len(allowed) >= 2:
        assert sorted(shares[0] + shares[1]) == allowed
        assert [seen(step, rank)["HPC_CORES"] for rank in range(2)] == [str(len(share)) for share in shares]
        assert seen(step, 0)["OMP_NUM_THREADS"] == str(len(shares[0]))
    environ = {**step_environ(0, tasks_per_node=(1,)), "OMP_NUM_THREADS": "7"}
    step.agent(environ, "--cores-asked", "999", "--", "show.py")
    assert step.ends()[1].code == 0 and seen(step, 0)["OMP_NUM_THREADS"] == "7"
    assert "999 were asked for" in step.text(1)


# ---- layouts and the meeting -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks_per_node", "arguments", "world"),
    [
        ((2,), [], 2),  # task per GPU, one node
        ((1, 1), ["--workers-per-node", "2", "--allow-loopback"], 4),  # task per node
        ((2, 1), ["--allow-loopback"], 3),  # uneven
    ],
)
def test_every_layout_makes_one_world(
    step: Step, tasks_per_node: tuple[int, ...], arguments: list[str], world: int
) -> None:
    for task in range(sum(tasks_per_node)):
        step.agent(step_environ(task, tasks_per_node=tasks_per_node), *arguments, "--", "train.py")
    ended = step.ends()
    assert [one.code for one in ended] == [0] * len(ended), [one.stderr for one in ended]
    text = "".join(one.stdout for one in ended)
    assert sorted(rank for rank in range(world) if f"rank {rank} done" in text) == list(range(world))


def test_d15_nodes_with_different_numbers_of_workers_share_no_rank(step: Step) -> None:
    for task, workers in enumerate((2, 1)):
        environ = step_environ(task, tasks_per_node=(1, 1))
        step.agent(environ, "--workers-per-node", str(workers), "--allow-loopback", "--", "show.py")
    assert [one.code for one in step.ends()] == [0, 0]
    places = [
        (seen(step, rank)["RANK"], seen(step, rank)["LOCAL_RANK"], seen(step, rank)["GROUP_RANK"]) for rank in range(3)
    ]
    assert places == [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1")]
    assert {seen(step, rank)["WORLD_SIZE"] for rank in range(3)} == {"3"}


def test_l01_two_jobs_on_one_host_do_not_meet_each_other(step: Step) -> None:
    for job in (JOB, f"{JOB}8"):
        for task in range(2):
            step.agent(step_environ(task, job_id=job), "--", "train.py")
    ended = step.ends()
    assert [one.code for one in ended] == [0] * 4, [one.stderr for one in ended]


def test_two_steps_of_one_job_at_once_do_not_meet_each_other(step: Step) -> None:
    for number in range(2):
        for task in range(2):
            step.agent(step_environ(task, SLURM_STEP_ID=number), "--", "train.py")
    assert [one.code for one in step.ends()] == [0] * 4


def test_l03_ports_taken_by_strangers_are_passed_by_and_every_rank_learns_the_next(step: Step) -> None:
    ports = candidate_ports(JOB, None, 0, "", "0")
    strangers = [socket.create_server(("127.0.0.1", port)) for port in ports[:3]]
    for task in range(2):
        step.agent(step_environ(task), "--", "show.py")
    ended = step.ends()
    for stranger in strangers:
        stranger.close()
    assert [one.code for one in ended] == [0, 0], [one.stderr for one in ended]
    used = {seen(step, rank)["MASTER_PORT"] for rank in range(2)}
    assert len(used) == 1 and int(str(used.pop())) in ports[3:]


def test_a_preset_port_is_kept_and_refused_when_taken(step: Step) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        step.agent({**step_environ(0, tasks_per_node=(1,)), "MASTER_PORT": port}, "--", "show.py")
        (ended,) = step.ends()
        assert ended.code == 69 and port in ended.stderr and "MASTER_PORT" in ended.stderr
    step.agent({**step_environ(0, tasks_per_node=(1,)), "MASTER_PORT": port}, "--", "show.py")
    assert step.ends()[1].code == 0 and seen(step, 0)["MASTER_PORT"] == port


def test_l11_ranks_that_never_arrive_are_named_with_their_node(step: Step) -> None:
    for task in range(2):
        environ = step_environ(task, tasks_per_node=(2, 2))
        step.agent(environ, "--allow-loopback", "--rendezvous-timeout", "12", "--", "train.py")
    ended = step.ends()
    assert [one.code for one in ended] == [69, 69]
    assert "ranks 2,3 (node n2) never arrived within 12 s" in ended[0].stderr
    assert "ranks 2,3 (node n2) never arrived" in ended[1].stderr and "rank 1 on" in ended[1].stderr


def test_a_missing_rank_zero_is_named_by_the_others(step: Step) -> None:
    step.agent(step_environ(1), "--rendezvous-timeout", "3", "--", "train.py")
    (ended,) = step.ends()
    assert ended.code == 69 and "rank 1 on" in ended.stderr and "was not reached" in ended.stderr


def test_counts_that_contradict_each_other_across_tasks_are_refused_within_seconds(step: Step) -> None:
    step.agent(step_environ(0, tasks_per_node=(1, 1)), "--allow-loopback", "--", "train.py")
    other = step_environ(1, tasks_per_node=(1, 1), SLURM_STEP_NUM_NODES=1, SLURM_NNODES=1)
    other |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    other |= {"SLURM_STEP_NODELIST": "n1", "SLURM_JOB_NODELIST": "n1"}
    step.agent(other, "--allow-loopback", "--", "train.py")
    ended = step.ends()
    assert [one.code for one in ended] == [78, 78]
    assert "nodes=2" in ended[0].stderr and "nodes=1" in ended[0].stderr
    assert max(one.seconds for one in ended) < 30


# ---- how they end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code", "first", "words"),
    [
        ("raise2", 1, 2, "ValueError: bad batch 17"),
        ("exit1", 3, 1, "exited 3"),
        ("kill1", 137, 1, "killed by SIGKILL"),
        ("segv0", 139, 0, "killed by SIGSEGV"),
    ],
)
def test_l14_f07_f10_one_dies_all_go_and_the_first_is_named(
    step: Step, how: str, code: int, first: int, words: str
) -> None:
    """l14, f10, f07: two nodes of two workers; every agent ends with the first failing rank's code."""
    for task in range(2):
        environ = run_dir_environ(step, task, tasks_per_node=(1, 1), STEPS=1000)
        step.agent(environ, "--workers-per-node", "2", "--allow-loopback", "--", "train.py", how, "sleep", "child")
    for task in range(2):
        step.wait_for("ready", task)
    step.look()
    ended = step.ends()
    assert [one.code for one in ended] == [code, code], [one.stderr for one in ended]
    assert step.gone(5), step.left()
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["code"] == code and outcome["first"]["rank"] == first and words in outcome["first"]["message"]
    log = (step.folder / "run" / "attempt-0" / f"rank-{first}.log").read_text()
    assert "ready at" in log and outcome["first"]["log"].endswith(f"rank-{first}.log")
    if how == "raise2":
        assert "bad batch 17" in outcome["first"]["traceback"] and "train.py" in outcome["first"]["traceback"]
        assert "hpc/node" not in outcome["first"]["traceback"]


def test_f11_what_was_printed_is_in_the_file_after_kill(step: Step) -> None:
    (step.folder / "say.py").write_text(
        "import os, signal\nprint('last words')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    step.agent(run_dir_environ(step, tasks_per_node=(1,)), "--", "say.py")
    (ended,) = step.ends()
    assert ended.code == 137
    log = step.folder / "run" / "attempt-0" / "rank-0.log"
    assert log.read_text() == "last words\n" and log.stat().st_mode & 0o777 == 0o600


def test_f06_f07_leftovers_of_a_good_run_are_ended_and_it_stays_good(step: Step) -> None:
    step.agent(step_environ(0, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "train.py", "child", "sleep")
    step.wait_for("rank 1 ready")
    time.sleep(0.3)
    assert any(process.name() == "sleep" for process in step.look())
    (ended,) = step.ends()
    assert ended.code == 0
    assert step.gone(5), step.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_c01_c15_a_signal_to_the_agent_ends_all_and_leaves_nothing(step: Step, number: signal.Signals) -> None:
    environ = step_environ(0, tasks_per_node=(1,), STEPS=10000)
    agent = step.agent(environ, "--workers-per-node", "2", "--", "train.py", "child", "sleep")
    step.wait_for("rank 0 ready")
    step.wait_for("rank 1 ready")
    time.sleep(0.3)
    step.look()
    send(agent, number)
    (ended,) = step.ends()
    assert ended.code in (128 + number, 1), ended.stderr
    assert step.gone(10), step.left()


def test_c02_c05_killing_the_agent_takes_its_workers_along(step: Step) -> None:
    environ = step_environ(0, tasks_per_node=(1,), STEPS=10000)
    agent = step.agent(environ, "--workers-per-node", "2", "--", "train.py", "sleep")
    step.wait_for("rank 0 ready")
    step.wait_for("rank 1 ready")
    step.look()
    agent.kill()
    step.ends(10)
    assert step.gone(10), step.left()


def test_c02_what_left_the_workers_sessions_goes_with_a_killed_agent_too(step: Step) -> None:
    mark = f"local.{os.getpid()}.0.{os.urandom(8).hex()}"
    environ = step_environ(0, tasks_per_node=(1,), STEPS=10000, HPC_MARK=mark)
    agent = step.agent(environ, "--workers-per-node", "2", "--", "train.py", "child", "sleep")
    step.wait_for("rank 0 ready")
    step.wait_for("rank 1 ready")
    time.sleep(0.3)
    assert [process.name() for process in step.look()].count("sleep") == 4
    agent.kill()
    step.ends(10)
    assert step.gone(10), step.left()
    deadline = time.monotonic() + 10
    while carriers := [process for process in processes.look() if mark in process.tag]:  # the sentinel itself
        assert time.monotonic() < deadline, carriers
        time.sleep(0.05)


DEAF = """
import os, signal, subprocess, sys, time, torch
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"])
print("rank", os.environ["RANK"], "ready", flush=True)
time.sleep(2)
if os.environ["RANK"] == "1":
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
time.sleep(300)
"""


def test_c11_ranks_that_are_deaf_to_sigterm_are_gone_within_the_kill_wait(step: Step) -> None:
    (step.folder / "deaf.py").write_text(DEAF)
    step.agent(step_environ(0, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "deaf.py")
    step.wait_for("rank 0 ready")
    step.wait_for("rank 1 ready")
    step.look()
    began = time.monotonic()
    (ended,) = step.ends()
    assert ended.code == 1 and "CUDA out of memory" in ended.stderr
    assert step.gone(5), step.left()
    assert time.monotonic() - began < 30  # Slurm's KillWait, after which a node is drained


def test_killing_one_agent_ends_the_other_node_too(step: Step) -> None:
    agents = []
    for task in range(2):
        environ = run_dir_environ(step, task, tasks_per_node=(1, 1), STEPS=10000)
        agents.append(step.agent(environ, "--workers-per-node", "2", "--allow-loopback", "--", "train.py", "sleep"))
    for task in range(2):
        step.wait_for("ready", task)
    step.look()
    agents[1].kill()
    ended = step.ends()
    assert ended[0].code != 0
    assert step.gone(5), step.left()
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["code"] == ended[0].code


def test_q04_usr1_and_usr2_reach_a_handler_and_hurt_nobody_without_one(step: Step) -> None:
    (step.folder / "hear.py").write_text(
        "import signal, time, os\nheard = []\n"
        "if os.environ['RANK'] == '0': signal.signal(signal.SIGUSR2, lambda n, f: heard.append(n))\n"
        "print('ready', flush=True)\n"
        "until = time.time() + 3\n"
        "while time.time() < until: time.sleep(0.05)\n"
        "print('heard', heard)\n"
    )
    agent = step.agent(step_environ(0, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "hear.py")
    step.wait_for("[rank 0] ready")
    step.wait_for("[rank 1] ready")
    send(agent, signal.SIGUSR2)
    send(agent, signal.SIGUSR1)
    (ended,) = step.ends()
    assert ended.code == 0
    assert "[rank 0] heard [12]" in ended.stdout and "[rank 1] heard []" in ended.stdout


SLOW = """
import pathlib, time
pathlib.Path("importing").touch()
time.sleep(SECONDS)
"""


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_sigterm_before_the_workers_ends_the_step_at_once_as_a_notice(step: Step) -> None:
    (step.folder / "slow.py").write_text(SLOW.replace("SECONDS", "300"))
    environ = {**run_dir_environ(step, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{step.folder}"}
    agent = step.agent(environ, "--preload", "slow", "--", "train.py")
    wait_for_file(step.folder / "importing")
    step.look()
    send(agent, signal.SIGTERM)
    (ended,) = step.ends(30)
    assert ended.code == 143 and "SIGTERM came before any worker was started" in ended.stderr
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["code"] == 143 and outcome["first"]["by_us"] is True
    assert step.gone(5), step.left()


def test_a_warning_before_the_workers_reaches_the_training_core(step: Step) -> None:
    """It leaves without a step, whichever way its process was made."""
    (step.folder / "slow.py").write_text(SLOW.replace("SECONDS", "1"))
    environ = {**run_dir_environ(step, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{step.folder}"}
    for number, fork in enumerate(([], ["--no-fork"])):
        agent = step.agent(environ, *fork, "--workers-per-node", "2", "--preload", "slow", "jobs.digits")
        if fork:
            while "cores for 2 workers" not in step.text(number):  # nothing is preloaded: soon after this it forks
                time.sleep(0.005)
        else:
            wait_for_file(step.folder / "importing")
        send(agent, signal.SIGUSR2)
        assert step.ends()[number].code == 75, step.text(number)
        assert "stopped at step 0 on notice (SIGUSR2)" in step.text(number)


def test_q04_a_warning_before_a_script_has_its_handler_is_kept_for_it(step: Step) -> None:
    (step.folder / "slow.py").write_text(SLOW.replace("SECONDS", "1"))
    (step.folder / "late.py").write_text(
        "import signal, sys, time\ntime.sleep(1.5)\nsignal.signal(signal.SIGUSR2, lambda n, f: sys.exit(75))\n"
        "time.sleep(60)\n"
    )
    environ = {**step_environ(0, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{step.folder}"}
    agent = step.agent(environ, "--preload", "slow", "--", "late.py")
    wait_for_file(step.folder / "importing")
    send(agent, signal.SIGUSR2)
    assert step.ends()[0].code == 75


def test_a_rank_of_the_core_that_fails_takes_the_others_along_though_they_hear_notices(step: Step) -> None:
    environ = {**run_dir_environ(step, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    arguments = ("toy", "samples=4000", "train.batch_size=8", "slow_elsewhere_s=60")
    trouble = ("trouble=raise", "trouble_step=1", "trouble_rank=1")
    step.agent(environ, "--workers-per-node", "2", *arguments, *trouble)
    (ended,) = step.ends()
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert ended.code == 1 and outcome["first"]["rank"] == 1 and "bad batch 17" in outcome["first"]["message"]
    assert "notice" not in step.text() and step.gone(5)


def test_a_stopped_worker_is_ended_and_named(step: Step) -> None:
    (step.folder / "wait.py").write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(300)\n")
    step.agent(run_dir_environ(step, tasks_per_node=(1,)), "--workers-per-node", "2", "--", "wait.py")
    step.wait_for("[rank 1] pid")
    pid = int(step.text().split("[rank 1] pid ")[1].split()[0])
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    (ended,) = step.ends()
    assert ended.code == 124 and time.monotonic() - stopped > 7.5, ended.stderr
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["first"]["rank"] == 1 and outcome["first"]["hung"] is True
    assert outcome["first"]["message"].startswith("stopped (as by SIGSTOP) for ")
    assert outcome["first"]["stacks"] == "rank 0 in <module> at wait.py:3; rank 1 stopped by a signal"
    text = (step.folder / "run" / "attempt-0" / "stacks" / "rank-1.txt").read_text()
    assert "state T (stopped)" in text and "system call" in text
    assert step.gone(5), step.left()


def test_a_rank_of_the_core_that_hangs_is_ended_with_its_step_and_phase(step: Step) -> None:
    environ = {**run_dir_environ(step, tasks_per_node=(1,)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    trouble = ("trouble=sleep", "trouble_step=4", "trouble_rank=1", "train.loader_workers=0")
    arguments = ("--workers-per-node", "2", "--hang-timeout", "5", "toy", "samples=400", "train.batch_size=8")
    step.agent(environ, *arguments, *trouble)
    (ended,) = step.ends()
    assert ended.code == 124, ended.stderr
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["first"]["hung"] is True and outcome["last_step"] == 3
    message = outcome["first"]["message"]
    assert message.startswith("hung: no sign of life for ") and message.endswith("phase step, after step 3")
    assert step.gone(5)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_time(step: Step) -> None:
    (step.folder / "deaf.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(300)\n"
    )
    agent = step.agent(step_environ(0, tasks_per_node=(1,)), "--grace", "2", "--", "deaf.py")
    step.wait_for("ready")
    begun = time.monotonic()
    send(agent, signal.SIGTERM)
    (ended,) = step.ends()
    assert ended.code == 137 and 1.5 < time.monotonic() - begun < 10
    assert step.gone(1)


SAVE = """
import os, signal, sys, time
told = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda n, f: told.append(n))
print("ready", flush=True)
while not told:
    time.sleep(0.02)
if "late" in sys.argv and os.environ["RANK"] == "3":
    time.sleep(3)
if "never" in sys.argv and os.environ["RANK"] == "3":
    time.sleep(300)
print("saved", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(("how", "number"), [("", signal.SIGUSR2), ("late", signal.SIGTERM), ("never", signal.SIGUSR2)])
def test_q09_ranks_that_save_and_leave_are_no_failure(step: Step, how: str, number: signal.Signals) -> None:
    """All agents end with 75 when all have saved, however late one is within the grace time."""
    (step.folder / "save.py").write_text(SAVE)
    agents = []
    for task in range(2):
        environ = run_dir_environ(step, task, tasks_per_node=(1, 1))
        arguments = ["--workers-per-node", "2", "--allow-loopback", "--grace", "8" if how == "late" else "2"]
        agents.append(step.agent(environ, *arguments, "--", "save.py", how))
    for task in range(2):
        step.wait_for(f"[rank {2 * task}] ready", task)
        step.wait_for(f"[rank {2 * task + 1}] ready", task)
    for agent in agents:
        send(agent, number)
    ended = step.ends()
    assert [one.code for one in ended] == [75, 75], [one.stderr for one in ended]
    saved = sum(one.stdout.count("saved") for one in ended)
    assert saved == (3 if how == "never" else 4)
    outcome = json.loads((step.folder / "run" / "attempt-0" / "outcome.json").read_text())
    assert outcome["code"] == 75
    assert step.gone(3)


def test_x14_an_unhealthy_gpu_node_is_named_before_any_rendezvous(step: Step) -> None:
    stub = step.folder / "nvidia-smi"
    stub.write_text(
        "#!/bin/sh\necho 'Unable to determine the device handle for GPU 0000:07:00.0: Unknown Error'\nexit 15\n"
    )
    stub.chmod(0o755)
    environ = step_environ(1, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE=2)
    environ["PATH"] = f"{step.folder}:{environ['PATH']}"
    begun = time.monotonic()
    step.agent(environ, "--", "train.py")
    (ended,) = step.ends()
    assert ended.code == 69 and time.monotonic() - begun < 30
    for text in (socket.gethostname(), "nvidia-smi", "15", "Unknown Error", "--exclude"):
        assert text in ended.stderr


def test_no_zombie_stays_while_a_worker_runs(step: Step) -> None:
    (step.folder / "spawn.py").write_text(
        "import subprocess, time\n"
        "for _ in range(5): subprocess.Popen(['sh', '-c', 'sleep 0.2 & exit 0'], start_new_session=True).wait()\n"
        "print('spawned', flush=True)\ntime.sleep(2)\n"
    )
    agent = step.agent(step_environ(0, tasks_per_node=(1,)), "--", "spawn.py")
    step.wait_for("spawned")
    time.sleep(1)
    states = [child.status() for child in psutil.Process(agent.pid).children(recursive=True)]
    assert psutil.STATUS_ZOMBIE not in states
    assert step.ends()[0].code == 0


UNTIL_TOLD = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
print("ready", flush=True)
told = torch.zeros(1)
while not told:
    told = torch.tensor([float(os.path.exists("stop"))])
    dist.all_reduce(told)
    time.sleep(0.02)
dist.destroy_process_group()
"""


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    return {
        (found.laddr.ip, found.laddr.port)
        for process in processes
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


def rogue(port: int, number: int) -> bytes:
    """One who connects and sends what is no part of any protocol, or a part of ours or the store's without the key."""
    noise = [
        b'{"proof": "0"}\n', b'{"joined": {"task": 1}}\n', os.urandom(64), b"\n" * 99, '{"proof": "é"}\n'.encode(),
        b'{"proof": "\\ud800"}\n', b"[" * 8000 + b"\n", b"\xff" * 300_000, b"GET / HTTP/1.1\r\n\r\n", b"",
    ]  # fmt: skip
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.settimeout(0.03)
        try:
            connection.sendall(noise[number % len(noise)])
            while data := connection.recv(4096):
                answer += data
        except OSError:
            return answer
    return answer


def test_s5_on_one_node_all_listens_on_loopback(step: Step) -> None:
    (step.folder / "train.py").write_text(UNTIL_TOLD)
    for task in range(2):
        step.agent({**step_environ(task), "HPC_SECRET": "s" * 32}, "--", "train.py")
    for task in range(2):
        step.wait_for("ready", task)
    found = listening(step.look())
    assert len(found) >= 2 and {ip for ip, _ in found} == {"127.0.0.1"}
    (step.folder / "stop").touch()
    assert [one.code for one in step.ends()] == [0, 0]


def test_s5_a_hundred_rogues_at_the_rendezvous_of_several_nodes_write_no_key(step: Step) -> None:
    """Some come before the other node does, some stay and say nothing, some come while the ranks train. The host never
    tells them the store's port, and the store has no key but those of the ranks. What somebody can do who finds that
    port and speaks c10d's protocol there is c10d's to prevent, and told in the README.
    """
    (step.folder / "train.py").write_text(UNTIL_TOLD)
    arguments = ("--allow-loopback", "--", "train.py")
    environs = [{**step_environ(task, tasks_per_node=(1, 1)), "HPC_SECRET": "s" * 32} for task in range(2)]
    step.agent(environs[0], *arguments)
    store_port, meeting_port = candidate_ports(JOB, None, 0, "s" * 32, "0")[:2]
    deadline = time.monotonic() + 60
    while (found := listening(step.look())) != {("127.0.0.1", store_port), ("127.0.0.1", meeting_port)}:
        assert time.monotonic() < deadline, (found, step.text())
        time.sleep(0.05)
    silent = [socket.create_connection(("127.0.0.1", meeting_port)) for _ in range(20)]
    answers = [rogue(meeting_port, number) for number in range(40)]
    step.agent(environs[1], *arguments)
    for task in range(2):
        step.wait_for("ready", task)
    store = torch.distributed.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False)
    keys = store.num_keys()
    answers += [rogue(meeting_port, number) for number in range(30)]
    answers += [rogue(store_port, number) for number in range(10)]
    assert keys > 0 and store.num_keys() == keys
    assert len(silent) + len(answers) == 100
    assert not any(str(store_port).encode() in answer or b"go" in answer for answer in answers)
    del store
    (step.folder / "stop").touch()
    assert [one.code for one in step.ends()] == [0, 0], step.text()
    for connection in silent:
        connection.close()


def test_a_script_that_ends_its_group_before_its_model_is_freed_still_exits(step: Step) -> None:
    """The model is local to main(): without care about one run in two of this hung for ever in Gloo's destructor."""
    (step.folder / "ends.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 10)))\n"
        "    model(torch.randn(32, 64)).sum().backward()\n"
        "    dist.barrier()\n"
        "    dist.destroy_process_group()\n"
        "main()\n"
    )
    environ = {**step_environ(0, tasks_per_node=(1,)), "OMP_NUM_THREADS": "1"}
    for _ in range(5):
        step.agent(environ, "--workers-per-node", "8", "--", "ends.py")
        assert step.ends()[-1].code == 0
