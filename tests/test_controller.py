"""The controller: what step it plans, what it tells the agents, and how it says how it ended."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from steps import ROOT, Step, send

from hpc.allocation import allocation as allocations
from hpc.allocation.allocation import Allocation
from hpc.allocation.controller import Controller
from hpc.allocation.policy import Decision
from hpc.allocation.step import agent_command, for_srun, plan_step, step_command
from hpc.allocation.verdict import End
from hpc.config import Loaded
from hpc.errors import EnvironmentMismatch
from hpc.launch import main, unused_id
from hpc.rundir import RunDirectory, write_private
from hpc.schema import Config, LaunchConfig

STUBS = ROOT / "tests" / "fake_slurm" / "bin"

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_PER_NODE": "4",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE": "24(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def loaded(command: tuple[str, ...] = ("train.py", "--lr", "0.1"), **launch: object) -> Loaded:
    return Loaded(Config(command=list(command), launch=LaunchConfig(**launch)), None)  # type: ignore[arg-type]


def planned(environ: dict[str, str], **launch: object) -> list[str]:
    config = loaded(**launch)
    step = plan_step(allocations.read(environ), config)
    return step_command(step, agent_command(step, config, "/python"))


# ---- what Slurm granted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "gpu:a100:2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:1,v100:2"}, 3),
        ({"SLURM_GPUS_PER_NODE": ""}, 4),
        ({"SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "", "SLURM_JOB_GPUS": "2,3"}, 2),
        ({"SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": "0"}, None),
    ],
)
def test_gpus_of_a_node(changes: dict[str, str], gpus: int | None) -> None:
    assert allocations.read({**BATCH, **changes}).gpus_per_node == gpus


def test_arrays_attempts_and_uneven_cores() -> None:
    environ = {
        **BATCH,
        "SLURM_ARRAY_JOB_ID": "50",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_CPUS_PER_NODE": "24,8(x3)",
    }
    read = allocations.read(environ)
    assert (read.run_id, read.attempt, read.cpus_per_node) == ("50_3", 2, 8)
    assert allocations.read({}) == allocations.LOCAL


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"SLURM_STEP_ID": "0"}, ("SLURM_STEP_ID=0", "hpc.node")),
        ({"SLURM_HET_SIZE": "2"}, ("SLURM_HET_SIZE=2", "not supported")),
        ({"SLURM_JOB_NUM_NODES": "two"}, ("SLURM_JOB_NUM_NODES='two'",)),
    ],
)
def test_l04_r24_where_no_controller_can_run(changes: dict[str, str], texts: tuple[str, ...]) -> None:
    with pytest.raises(EnvironmentMismatch) as caught:
        allocations.read({**BATCH, **changes})
    for text in texts:
        assert text in str(caught.value)


def test_an_interactive_step_is_a_place_for_a_controller() -> None:
    assert allocations.read({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)}).job_id == "7"


# ---- the step --------------------------------------------------------------------------------------------------------


def test_l16_the_step_gets_its_nodes_tasks_and_cores() -> None:
    argv = planned(BATCH)
    for word in (
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--kill-on-bad-exit=1",
        "--label",
    ):
        assert word in argv
    assert argv[argv.index("--") + 1 :] == ["train.py", "--lr", "0.1"]
    per_gpu = planned(BATCH, layout="task-per-gpu")
    for word in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6", "--layout=task-per-gpu"):
        assert word in per_gpu


def test_s04_cores_per_task_are_passed_on() -> None:
    argv = planned({**BATCH, "SLURM_CPUS_PER_TASK": "6"}, layout="task-per-gpu")
    assert "--cpus-per-task=6" in argv


def test_s25_x10_r23_the_step_names_no_gpus() -> None:
    for layout in ("task-per-node", "task-per-gpu"):
        text = " ".join(planned(BATCH, layout=layout))
        assert "--gpu" not in text and "--gres" not in text and "CUDA_VISIBLE_DEVICES" not in text


def test_r11_s25_gpus_asked_for_by_task_are_all_given_to_the_step() -> None:
    """A step of one task per node would get one of them, and train on it without a word."""
    by_task = {name: text for name, text in BATCH.items() if name != "SLURM_GPUS_PER_NODE"}
    by_task |= {"SLURM_TASKS_PER_NODE": "4(x2)"}
    for asked in ({"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_TRES_PER_TASK": "cpu:6,gres/gpu:1"}):
        for layout in ("task-per-node", "task-per-gpu"):
            assert "--gpus-per-node=4" in planned({**by_task, **asked}, layout=layout)
        with pytest.raises(EnvironmentMismatch, match="TASKS_PER_NODE=2,1.*--gpus-per-node=N"):
            allocations.read({**by_task, **asked, "SLURM_TASKS_PER_NODE": "2,1"})
    assert not [word for word in planned({**BATCH, "SLURM_TRES_PER_TASK": "cpu:6"}) if "gpus-per-node" in word]


def test_r11_r20_a_task_for_each_gpu_needs_as_many_on_each_node() -> None:
    """With --gpus=4, two nodes may have 3 and 1: six ranks would be started, or two."""
    for here in ("1", "3"):
        uneven = {**BATCH, "SLURM_GPUS_PER_NODE": "", "SLURM_GPUS": "a100:4", "SLURM_GPUS_ON_NODE": here}
        with pytest.raises(EnvironmentMismatch, match=f"SLURM_GPUS=4 on 2 nodes, {here} of them.*--gpus-per-node"):
            planned(uneven, layout="task-per-gpu")
        assert "--ntasks=2" in planned(uneven)  # there, each agent counts its own
    assert "--ntasks=4" in planned({**uneven, "SLURM_GPUS_ON_NODE": "2"}, layout="task-per-gpu")
    assert "--ntasks=8" in planned({**BATCH, "SLURM_GPUS": "3"}, layout="task-per-gpu")  # an outer job's


def test_s06_s07_requests_of_another_job_do_not_reach_the_step() -> None:
    """sbatch hands on what it is called in; seen on 22.05.8, see also tests/cluster/test_both_doors.py."""
    own = {"SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "quiet,cores", "SLURM_MEM_PER_CPU": "500"}
    assert for_srun(own) == own
    binding = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_MEM_BIND": "map_mem:0"}
    by_task = {
        "SLURM_GPUS_PER_NODE": "2",
        "SLURM_GPUS": "3",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_NTASKS_PER_GPU": "1",
        "SLURM_TRES_PER_TASK": "gres/gpu:1",
    }
    memory = {"SLURM_MEM_PER_NODE": "800", "SLURM_MEM_PER_CPU": "500"}
    assert for_srun({**own, **binding, **by_task, **memory}) == {
        "SLURM_CONF": "/c",
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_PER_NODE": "2",
    }


def test_s09_an_array_and_restarts_that_are_another_jobs() -> None:
    told = {"JobId": "7", "UserId": "a(1)", "SubmitTime": "x", "NumNodes": "2", "BatchFlag": "1", "Restarts": "0"}
    leaked = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    read = allocations.read({**BATCH, **leaked})
    true = allocations.confirmed(read, told)
    assert (true.run_id, true.restarts, true.attempt) == ("7", 0, 0)
    own = allocations.confirmed(read, {**told, "ArrayJobId": "5", "ArrayTaskId": "3", "Restarts": "2"})
    for fields in ({}, {"JobId": "7", "JobState": "RUNNING"}, {**told, "JobId": "8"}):
        assert allocations.confirmed(read, fields) == own == read


@pytest.mark.parametrize(
    ("title", "is_task"),
    [
        ("slurmstepd: [7.batch]", False),
        ("slurmstepd: [7.interactive]", False),
        ("slurmstepd: [7.4294967291]", False),
        ("slurmstepd: [6.0]", False),
        ("slurmstepd: [7.0]", True),
        ("slurmstepd: [7+1.0]", True),
        ("bash", True),
    ],
)
def test_s07_a_step_that_is_only_told_of_is_none(title: str, is_task: bool) -> None:
    """sbatch called inside a step leaves SLURM_STEP_ID to the job; who runs this process is seen by its ancestors."""
    child = "from hpc.allocation.allocation import is_task; import os, sys; sys.exit(is_task(os.environ))"
    parent = f"import subprocess, sys; sys.exit(subprocess.call([{sys.executable!r}, '-c', {child!r}]))"
    environ = {**os.environ, **BATCH, "SLURM_STEP_ID": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([title, "-c", parent], executable=sys.executable, env=environ, timeout=60, check=False)
    assert done.returncode == is_task


def test_fewer_cores_than_workers_are_overcommitted_and_not_refused() -> None:
    argv = planned({**BATCH, "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}, layout="task-per-gpu")
    assert "--overcommit" in argv and "--cpus-per-task=1" in argv
    assert "--overcommit" not in planned(BATCH)


def test_without_gpus_the_number_of_workers_is_told() -> None:
    environ = {**BATCH, "SLURM_GPUS_PER_NODE": "", "SLURM_GPUS_ON_NODE": ""}
    assert "--workers-per-node=3" in planned(environ, workers_per_node=3)
    assert "--workers-per-node=1" in planned(environ)
    assert not any(word.startswith("--workers-per-node") for word in planned(BATCH))


def test_a_local_run_needs_no_srun() -> None:
    config = loaded(workers_per_node=2)
    step = plan_step(Allocation(), config)
    argv = step_command(step, agent_command(step, config, "/python"))
    assert argv[0] == "/python" and "--workers-per-node=2" in argv


def test_a_step_that_is_kept_gives_the_budget_of_restarts_back(tmp_path: Path) -> None:
    run_dir = RunDirectory.create(tmp_path, "run")
    control = Controller(Allocation(), loaded((), max_restarts=1), run_dir)
    control.folder.mkdir()

    def killed(kept: int) -> Decision:
        control._clear_for_start()
        (run_dir.checkpoints / f"step-{kept}").mkdir(parents=True, exist_ok=True)
        (run_dir.checkpoints / f"step-{kept}" / "manifest.json").touch()
        decision = control._decide(End(code=137, started=True, reported=True))
        control.restarts += 1
        return decision

    told = [killed(kept) for kept in (10, 20, 30, 30)]
    assert [decision.action.value for decision in told] == ["again", "again", "again", "fail"]
    assert all("restart 1 of 1" in decision.reason and decision.pause_s == 0 for decision in told[:3])


def test_k19_a_record_that_cannot_be_written_stops_no_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: a limit on the size of files lets some bytes of the first event through, and then nothing."""
    run_dir = RunDirectory.create(tmp_path, "run")
    control = Controller(Allocation(), loaded(), run_dir)
    control.folder.mkdir()
    run_dir.append_event("started", attempt=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run_dir.record_file.stat().st_size + 20, hard))
    try:
        decision = control._decide(End(code=3, started=True, reported=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert decision.reason == "the program exited 3"
    said = capsys.readouterr().err
    assert all(f"the record could not be written ({event})" in said for event in ("decided", "verdict")), said
    run_dir.append_event("after")
    assert [event["event"] for event in run_dir.events()] == ["started", "after"]


def test_k17_each_trial_of_an_allocation_has_a_directory_and_finds_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two learning rates tried in one salloc: the second would have gone on with the checkpoints of the first."""
    first, second = (loaded(("train.py", "--lr", rate)) for rate in ("0.1", "0.2"))
    job, requeued = Allocation(job_id="7"), Allocation(job_id="7", restarts=1)
    for trial, wanted in ((first, "7"), (first, "7"), (second, "7-2"), (first, "7"), (second, "7-2")):
        assert unused_id(tmp_path / "train", job, trial) == wanted
        write_private(RunDirectory.create(tmp_path, "train", wanted).config_file, trial.to_yaml())
    assert capsys.readouterr().out.count("train-7 is a run of this job with other settings; this one is") == 2
    assert unused_id(tmp_path / "train", requeued, second) == "7-2"
    assert unused_id(tmp_path / "train", requeued, loaded(("train.py", "--lr", "0.3"))) == "7"


def test_an_attempt_whose_folder_cannot_be_made_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDirectory.create(tmp_path, "run", "a")
    run_dir.attempt(0).write_text("")
    assert main(["--local", "--run-dir", str(run_dir.path), "--", "true"]) == 2
    assert f"{run_dir.attempt(0)}: File exists" in capsys.readouterr().err


# ---- with stand-ins for Slurm ----------------------------------------------------------------------------------------


def batch_environ(folder: Path, **changes: str) -> dict[str, str]:
    """The batch step's environment, with the stub srun first on PATH and both nodes simulated here."""
    kept = {name: os.environ[name] for name in ("HOME", "OPENBLAS_CORETYPE") if name in os.environ}
    return {
        **kept,
        **BATCH,
        "PATH": f"{STUBS}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HPC_SITE_CONFIG": "",
        "FAKE_SLURM_LOG": str(folder / "calls.jsonl"),
        "XDG_STATE_HOME": str(folder / "state"),
        "FAKE_SLURM_GPUS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_GPUS_PER_NODE": "2",
        "SLURM_GPUS_ON_NODE": "2",
        **changes,
    }


def launch(folder: Path, *arguments: str, limit_s: float = 150, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc.launch", *arguments],
        env=batch_environ(folder, **changes),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def record(folder: Path) -> list[dict[str, object]]:
    (file,) = (folder / "runs").rglob("record.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_good_run_is_recorded_with_its_hosts_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())\n"
        "dist.destroy_process_group()\n"
    )
    done = launch(tmp_path, "launch.allow_loopback=true", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4.0") == 4
    assert "torch " in done.stdout.splitlines()[0] and sys.executable in done.stdout.splitlines()[0]
    assert (tmp_path / "runs" / "train-7" / "config.yaml").exists()
    started, ended = record(tmp_path)
    assert started["event"] == "started" and started["world_size"] == 4
    assert [place[1:] for place in started["nodes"]] == [[0, 2], [2, 2]]  # type: ignore[attr-defined]
    assert ended["event"] == "ended" and ended["code"] == 0


@pytest.mark.slow
def test_f10_f07_the_first_failing_rank_is_last_on_the_screen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"  # writes an error file of torch's own
        "def main():\n"
        "    dist.init_process_group('gloo')\n"
        "    if dist.get_rank() == 2: raise ValueError('bad batch 17')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "main()\n"
    )
    done = launch(tmp_path, "launch.allow_loopback=true", "--", "train.py")
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-6:]
    assert "rank 2 on" in last[-1] and "bad batch 17" in last[-1] and "rank-2.log" in last[-1]
    assert last[-2] == "ValueError: bad batch 17" and 'train.py", line 6' in "\n".join(last)
    ended, decided, verdict = record(tmp_path)[-3:]
    assert ended["first"]["rank"] == 2 and decided["decision"] == "fail"  # type: ignore[index]
    assert (verdict["cause"], verdict["rank"]) == ("exception", 2) and "bad batch 17" in verdict["traceback"]


@pytest.mark.slow
def test_f04_f10_exit_codes_and_kills_are_passed_on_in_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL) if 'kill' in sys.argv else sys.exit(42)\n"
        "time.sleep(60)\n"
    )
    done = launch(tmp_path, "launch.allow_loopback=true", "--", "train.py")
    assert done.returncode == 42 and "rank 1 on" in done.stderr.splitlines()[-1]
    done = launch(
        tmp_path, "launch.allow_loopback=true", "launch.max_restarts=0", "--", "train.py", "kill", SLURM_JOB_ID="8"
    )
    assert done.returncode == 137 and "perhaps out of host memory" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_x16_a_step_that_never_started_is_not_called_a_failure_of_the_program(tmp_path: Path) -> None:
    refusal = "srun: error: Unable to create step for job 7: Memory required by task is not available"
    done = launch(tmp_path, "launch.max_restarts=1", "--", "true", FAKE_SRUN_EXIT="1", FAKE_SRUN_STDERR=refusal)
    assert done.returncode == 69 and "restart 1 of 1, in 2 s" in done.stderr
    assert refusal in done.stderr and "no rank was started" in done.stderr
    events = record(tmp_path)
    assert [event["event"] for event in events] == ["ended", "decided", "verdict"] * 2
    assert events[-3]["started"] is False
    assert [event["cause"] for event in events[2::3]] == ["never started"] * 2
    assert [event["decision"] for event in events[1::3]] == ["again", "fail"]


def test_a_missing_srun_is_told_in_one_line(tmp_path: Path) -> None:
    done = launch(tmp_path, "--", "/bin/true", PATH="/nonexistent")
    assert done.returncode == 69 and done.stderr.count("\n") == 1
    assert "cannot run srun" in done.stderr and "PATH" in done.stderr


def test_l04_a_launcher_inside_an_srun_task_is_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, "--", "true", SLURM_STEP_ID="0")
    assert done.returncode == 78 and done.stderr.count("\n") == 1 and "SLURM_STEP_ID=0" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [["torchrun", "x.py"], ["nothere.py"], ["no-such-program"]])
def test_a_command_that_cannot_run_is_refused_before_srun(tmp_path: Path, command: list[str]) -> None:
    done = launch(tmp_path, "--", *command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "calls.jsonl").exists()


@pytest.mark.slow
def test_k17_two_attempts_of_one_job_have_one_directory(tmp_path: Path) -> None:
    for attempt in ("0", "1"):
        done = launch(tmp_path, "--", "sh", "-c", "echo attempt", SLURM_RESTART_COUNT=attempt, SLURM_NNODES="1",
                      SLURM_JOB_NUM_NODES="1", SLURM_JOB_CPUS_PER_NODE="4", SLURM_JOB_NODELIST="n1")  # fmt: skip
        assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.glob("attempt-*")) == ["attempt-0", "attempt-1"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "record.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_elements_of_an_array_have_a_directory_each(tmp_path: Path) -> None:
    one = {"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "n1"}
    for index in ("0", "1"):
        array = {"SLURM_ARRAY_JOB_ID": "50", "SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": f"5{index}"}
        assert launch(tmp_path, "--", "true", **one, **array).returncode == 0
        assert launch(tmp_path, "--run-dir", "given", "--", "true", **one, **array).returncode == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["true-50_0", "true-50_1"]
    assert sorted(path.name for path in (tmp_path / "given").iterdir()) == ["array-0", "array-1"]


@pytest.mark.slow
def test_r17_s10_a_local_run_inside_somebody_elses_allocation_is_alone_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os; print('world', os.environ['WORLD_SIZE'])\n")
    done = launch(tmp_path, "--local", "--", "show.py", SLURM_PROCID="3", RANK="5", WORLD_SIZE="9")
    assert done.returncode == 0 and "world 1" in done.stdout
    assert "job 7 are ignored" in done.stderr
    assert not (tmp_path / "calls.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_c01_c02_the_end_of_the_controller_is_the_end_of_all(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "wait.py").write_text(
        "import subprocess, time\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\nprint('ready', flush=True)\ntime.sleep(300)\n"
    )
    with Step(tmp_path) as step:
        argv = [sys.executable, "-m", "hpc.launch", "--local", "launch.workers_per_node=2", "--", "wait.py"]
        environ = {**batch_environ(tmp_path), "PATH": os.environ["PATH"]}
        controller = step.start(argv, environ)
        step.wait_for("[rank 0] ready")
        step.wait_for("[rank 1] ready")
        time.sleep(0.3)
        assert len(step.look()) >= 6
        send(controller, number)
        ended = step.ends()
        assert ended[0].code in (143, 137)
        assert step.gone(10), step.left()


@pytest.mark.slow
@pytest.mark.parametrize("fork", ["true", "false"])
def test_s23_agents_import_a_job_from_the_copy_and_work_in_the_working_directory(tmp_path: Path, fork: str) -> None:
    for where, text in (("code", "copy"), ("work", "edited")):
        job = tmp_path / where / "jobs" / "mine"
        job.mkdir(parents=True)
        (job / "__init__.py").touch()
        (job / "config.py").write_text(
            "from dataclasses import dataclass\n\n\n@dataclass\nclass Config:\n    a: int = 1\n"
        )
        (job / "job.py").write_text(f"import os\nraise RuntimeError('{text} in ' + os.path.basename(os.getcwd()))\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    (run_dir / "config.yaml").write_text(f"job: jobs.mine\nlaunch: {{fork: {fork}}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run_dir), "--workdir", str(tmp_path / "work")],
        env=batch_environ(tmp_path),
        cwd=tmp_path / "code",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "RuntimeError: copy in work" in done.stderr and "edited" not in done.stderr


def test_s23_a_command_runs_as_it_is_and_says_what_was_edited(tmp_path: Path) -> None:
    from hpc import snapshot

    work, run_dir = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    run_dir.mkdir(mode=0o700)
    (work / "a.py").write_text("print('old')\n")
    (work / "b.py").write_text("print('same')\n")
    snapshot.take(work, run_dir / "code")
    (work / "a.py").write_text("print('new')\n")
    (run_dir / "config.yaml").write_text("command: [sh, -c, echo hello]\n")
    done = subprocess.run(
        [sys.executable, "-m", "hpc.launch", "--local", "--run-dir", str(run_dir)],
        env=batch_environ(tmp_path),
        cwd=work,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "hello" in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if "changed since the submission" in line]
    assert "a.py" in line and "b.py" not in line


@pytest.mark.slow
def test_s9_what_a_worker_says_cannot_drive_the_terminal_from_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise ValueError('\\x1b[2J\\rhpc.launch: all is well\\u2028\\x07')\n")
    done = launch(tmp_path, "--local", "--", "evil.py")
    assert done.returncode == 1
    verdict = done.stderr[done.stderr.rindex("Traceback") :]
    assert "\\x1b[2J" in verdict and not any(c in verdict for c in "\x1b\r\x07\u2028")
