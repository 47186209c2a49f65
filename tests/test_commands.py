"""Slurm's commands against stand-ins: argv, answers of every kind, time-outs, and bytes that are no text."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from hpc.errors import SlurmCommandError
from hpc.slurm import commands
from hpc.slurm.states import JobState

STUBS = Path(__file__).parent / "fake_slurm" / "bin"

SHOW_JOB = """\
JobId=8 JobName=my job=x JobState=COMPLETED y
   UserId=user(1001) GroupId=user(1001) MCS_label=N/A
   Priority=4294901755 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   PreemptEligibleTime=2026-11-30T04:21:22 PreemptTime=2026-11-30T04:22:00
   NodeList=node[1-2]
   ReqB:S:C:T=0:0:*:* TRES=cpu=1,mem=2000M,node=1,billing=1
   Command=/home/a user/job 1.sh x=1 JobState=FAILED
   WorkDir=/home/a user
   Comment=c1 JobState=FAKE z\x20
   StdErr=/dev/null
   Power=
"""


class Slurm:
    """The stand-ins on PATH, their prepared answers and their log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch = monkeypatch
        self.log = folder / "log"
        self.answers = folder / "answers"
        self.answers.mkdir()
        monkeypatch.setenv("PATH", f"{STUBS}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_SLURM_LOG", str(self.log))
        monkeypatch.setenv("FAKE_SLURM_ANSWERS", str(self.answers))

    def says(self, program: str, stdout: str | bytes = "", *, code: int = 0, stderr: str = "") -> None:
        (self.answers / program).write_bytes(stdout if isinstance(stdout, bytes) else stdout.encode())
        (self.answers / f"{program}.exit").write_text(str(code))
        (self.answers / f"{program}.err").write_text(stderr)

    def calls(self) -> list[list[str]]:
        if not self.log.exists():
            return []
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [[entry["program"], *entry["argv"]] for entry in entries]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    commands._told.clear()
    return Slurm(monkeypatch, tmp_path)


def test_show_job_reads_values_with_blanks_and_believes_no_users_text(slurm: Slurm) -> None:
    slurm.says("scontrol_show", SHOW_JOB)
    fields = commands.show_job("8")
    assert fields["JobState"] == "RUNNING"
    assert fields["JobName"] == "my job=x JobState=COMPLETED y"
    assert fields["Command"] == "/home/a user/job 1.sh x=1 JobState=FAILED"
    assert fields["WorkDir"] == "/home/a user"
    assert fields["Comment"] == "c1 JobState=FAKE z"
    assert fields["PreemptTime"] == "2026-11-30T04:22:00"
    assert fields["TRES"] == "cpu=1,mem=2000M,node=1,billing=1"
    assert fields["Restarts"] == "2"
    assert fields["Power"] == ""
    assert slurm.calls() == [["scontrol", "show", "job", "8"]]


def test_a_job_on_one_line_is_read_too() -> None:
    fields = commands.parse_job(" ".join(line.strip() for line in SHOW_JOB.splitlines()))
    assert fields["JobName"] == "my job=x JobState=COMPLETED y"
    assert fields["JobState"] == "RUNNING"
    assert fields["Command"] == "/home/a user/job 1.sh x=1 JobState=FAILED"
    assert fields["Comment"] == "c1 JobState=FAKE z"
    assert fields["StdErr"] == "/dev/null"


def test_of_an_array_the_first_element_is_shown() -> None:
    assert (
        commands.parse_job("JobId=9 JobState=PENDING\n   A=1\n\nJobId=10 JobState=RUNNING\n")["JobState"] == "PENDING"
    )


def test_a_job_that_slurm_has_forgotten_has_no_fields_and_no_state(slurm: Slurm) -> None:
    for program in ("scontrol_show", "squeue"):
        slurm.says(program, code=1, stderr="slurm_load_jobs error: Invalid job id specified")
    assert commands.show_job("99") == {}
    assert commands.state_of("99") is None


def test_another_fault_of_scontrol_is_told_in_its_words(slurm: Slurm) -> None:
    slurm.says("scontrol_show", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(SlurmCommandError, match="scontrol show job 7: .*Unable to contact"):
        commands.show_job("7")


def test_squeue_is_asked_first_and_alone_when_it_knows(slurm: Slurm) -> None:
    slurm.says("squeue", "RUNNING")
    assert commands.state_of("7") is JobState.RUNNING
    assert [call[0] for call in slurm.calls()] == ["squeue"]
    assert "--jobs=7" in slurm.calls()[0]


def test_then_scontrol_then_accounting(slurm: Slurm) -> None:
    slurm.says("scontrol_show", code=1, stderr="Invalid job id specified")
    slurm.says("sacct", "PREEMPTED\nCANCELLED by 1000")
    assert commands.state_of("7") is JobState.CANCELLED
    assert [call[0] for call in slurm.calls()] == ["squeue", "scontrol", "sacct"]


def test_f08_without_accounting_one_warning_and_no_guess(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.says("scontrol_show", code=1, stderr="Invalid job id specified")
    slurm.says("sacct", code=1, stderr="Slurm accounting storage is disabled")
    for _ in range(3):
        assert commands.state_of("7") is None
    assert capsys.readouterr().err.count("Slurm accounting storage is disabled") == 1


def test_f08_a_state_that_is_no_word_of_slurms_is_not_success(slurm: Slurm) -> None:
    slurm.says("squeue", "WHATEVER")
    state = commands.state_of("7")
    assert state is JobState.UNKNOWN
    assert not state.succeeded


def test_f16_completing_then_pending_is_followed(slurm: Slurm) -> None:
    (slurm.answers / "squeue.1").write_text("COMPLETING\n")
    (slurm.answers / "squeue.2").write_text("PENDING\n")
    first, second = commands.state_of("7"), commands.state_of("7")
    assert first is JobState.COMPLETING and not first.is_finished
    assert second is JobState.PENDING


def test_an_array_with_one_element_still_running_is_running(slurm: Slurm) -> None:
    slurm.says("squeue", "COMPLETED\nPENDING\nRUNNING\nCOMPLETED")
    assert commands.state_of("7") is JobState.RUNNING
    slurm.says("squeue", "COMPLETED\nFAILED\nCOMPLETED")
    assert commands.state_of("7") is JobState.FAILED


def test_no_answer_at_all_is_an_error_and_not_a_state(slurm: Slurm) -> None:
    for program in ("squeue", "scontrol_show", "sacct"):
        slurm.says(program, code=1, stderr="Unable to contact slurm controller")
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        commands.state_of("7")


def test_x07_bytes_that_are_not_utf8_are_escaped(slurm: Slurm) -> None:
    slurm.monkeypatch.setenv("LC_ALL", "C")
    script = "/data/añejo-实验/job.sh"
    slurm.says("squeue", b"90|/data/d\xe9d\xe9/job.sh\n101|" + script.encode() + b"\n")
    assert commands.find_job_by_command(script) == "101"
    assert commands.find_job_by_command(os.fsdecode(b"/data/d\xe9d\xe9/job.sh")) == "90"


def test_find_job_by_command_takes_the_newest_and_only_the_whole_path(slurm: Slurm) -> None:
    slurm.says("squeue", "7|/r/a b/job.sh\n12|/r/a b/job.sh --flag\n30|/r/a b/job.sh.old\n31|(null)\nnonsense\n")
    assert commands.find_job_by_command(Path("/r/a b/job.sh")) == "12"
    assert commands.find_job_by_command("/r/other.sh") is None
    assert slurm.calls()[0][1] == "--me"


def test_partitions(slurm: Slurm) -> None:
    slurm.says(
        "sinfo", "low*|up|1-00:00:00|2|8|32000|gpu:4|(null)\nhigh|down|infinite|x|4+|8|(null)|a100,ib\nrubbish\n"
    )
    low, high = commands.partitions()
    assert (low.name, low.is_default, low.nodes, low.gres, low.features) == ("low", True, 2, "gpu:4", "")
    assert (high.name, high.is_default, high.nodes, high.gres, high.features) == ("high", False, 0, "", "a100,ib")


def test_test_only_gives_slurms_words(slurm: Slurm) -> None:
    assert commands.test_only(["--nodes=2", "job.sh"]) is None
    slurm.says("sbatch", code=1, stderr="sbatch: error: invalid partition specified: nope\nallocation failure: no")
    assert commands.test_only(["job.sh"]) == "sbatch: error: invalid partition specified: nope; allocation failure: no"
    assert slurm.calls()[0] == ["sbatch", "--test-only", "--nodes=2", "job.sh"]


def test_q01_requeue_and_cancel_of_an_array_element(slurm: Slurm) -> None:
    commands.requeue("1234_2")
    commands.cancel("1234_2")
    commands.cancel("7", signal_name="USR2", whole_job=True)
    assert slurm.calls() == [
        ["scontrol", "requeue", "1234_2"],
        ["scancel", "1234_2"],
        ["scancel", "--signal=USR2", "--full", "7"],
    ]


def test_a_refused_requeue_is_an_error_and_a_job_already_gone_is_none(slurm: Slurm) -> None:
    slurm.says("scontrol_requeue", code=1, stderr="Requested operation is presently disabled for job 7")
    with pytest.raises(SlurmCommandError, match="scontrol requeue 7: .*disabled"):
        commands.requeue("7")
    slurm.says("scancel", code=1, stderr="Kill job error on job id 7: Job/step already completing or completed")
    commands.cancel("7")
    slurm.says("scancel", code=1, stderr="Kill job error on job id 7: Access/permission denied")
    with pytest.raises(SlurmCommandError, match="denied"):
        commands.cancel("7")


@pytest.mark.parametrize("job_id", ["", "-A", "7;reboot", "7 8", "7\n", "all", "٣"])
def test_what_is_no_job_id_reaches_no_command(slurm: Slurm, job_id: str) -> None:
    for call in (commands.show_job, commands.state_of, commands.cancel, commands.requeue):
        with pytest.raises(SlurmCommandError, match="not a job id"):
            call(job_id)
    assert slurm.calls() == []


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmCommandError, match="sinfo is not on PATH"):
        commands.partitions()


def test_a_command_that_hangs_is_ended_with_all_its_children(slurm: Slurm, tmp_path: Path) -> None:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    child = hanging / "child"
    program = hanging / "squeue"
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {child}\nwait\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    slurm.monkeypatch.setenv("PATH", f"{hanging}{os.pathsep}{os.environ['PATH']}")
    start = time.monotonic()
    with pytest.raises(SlurmCommandError, match="squeue gave no answer within 1 s"):
        commands.ask("squeue", timeout_s=1.0)
    assert time.monotonic() - start < 20
    pid = int(child.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("a child of the hanging command is still alive")


def test_variables_that_change_the_output_do_not_reach_the_program(slurm: Slurm, tmp_path: Path) -> None:
    shows = tmp_path / "shows"
    shows.mkdir()
    (shows / "squeue").write_text("#!/bin/sh\nenv\n")
    (shows / "squeue").chmod(0o755)
    slurm.monkeypatch.setenv("PATH", f"{shows}{os.pathsep}{os.environ['PATH']}")
    slurm.monkeypatch.setenv("SQUEUE_FORMAT", "%j")
    slurm.monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    slurm.monkeypatch.setenv("LC_ALL", "C")
    lines = commands.ask("squeue").stdout.splitlines()
    assert "LC_ALL=C.UTF-8" in lines
    assert "SLURM_CONF=/etc/slurm/other.conf" in lines
    assert not any(line.startswith("SQUEUE_") for line in lines)


def test_the_srun_stand_in_starts_the_tasks_and_gives_the_highest_exit_code(slurm: Slurm) -> None:
    script = 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURM_STEP_TASKS_PER_NODE; [ "$SLURM_PROCID" = 1 ] && exit 7; exit 3'
    answer = commands.ask("srun", ["-N2", "--ntasks", "3", "--label", "sh", "-c", script])
    assert answer.returncode == 7
    assert sorted(answer.stdout.splitlines()) == ["0: 0 0 0 2,1", "1: 1 1 0 2,1", "2: 2 0 1 2,1"]


def test_the_sbatch_stand_in_keeps_script_argv_and_environment(slurm: Slurm, tmp_path: Path) -> None:
    slurm.monkeypatch.setenv("FAKE_SBATCH_FOLDER", str(tmp_path / "kept"))
    script = tmp_path / "a b.sh"
    script.write_text("#!/bin/sh\n")
    answer = commands.ask("sbatch", ["--nodes=2", str(script), "x=1"])
    assert answer.stdout == "Submitted batch job 101\n"
    kept = tmp_path / "kept" / "1"
    assert (kept / "script").read_text() == "#!/bin/sh\n"
    assert json.loads((kept / "argv.json").read_text()) == ["--nodes=2", str(script), "x=1"]
    assert json.loads((kept / "environ.json").read_text())["LC_ALL"] == "C.UTF-8"


def test_a_command_whose_other_end_hangs_up_can_ask_again() -> None:
    """SIGPIPE would end it without a word: seen with scontrol and a munged under load."""
    answer = commands.ask("sh", ["-c", "kill -s PIPE $$; echo lives"])
    assert (answer.returncode, answer.stdout) == (0, "lives\n")
