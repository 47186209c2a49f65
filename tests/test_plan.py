"""The plan and its script: what is asked of Slurm, what bash makes of it, and that no value can be more than a value."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from hpc import config
from hpc.errors import UsageError
from hpc.login.plan import Place, Plan, make_plan
from hpc.login.submitter import render

PLACE = Place(run_dir=Path("/runs/digits-1"), workdir=Path("/work"), python="/usr/bin/python3")
WHERE = {"toolkit": Path("/toolkit"), "code": Path("/runs/digits-1/code")}


def plan(*overrides: str, place: Place = PLACE, **flags: str) -> Plan:
    given = {f"slurm.{name}": value for name, value in flags.items()}
    return make_plan(config.load(overrides=overrides, flags=given, site=False), place)


def directives(script: str) -> dict[str, str | None]:
    """The script's options, read as sbatch 22.05 reads them: quotes as in a shell, and backslash escapes in all of them."""
    found: dict[str, str | None] = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            if line:
                break
            continue
        if line.startswith("#SBATCH "):
            text, quote, characters = "", "", iter(line.removeprefix("#SBATCH "))
            for character in characters:
                if character == "\\":
                    text += next(characters)
                elif character == quote:
                    quote = ""
                elif not quote and character in "'\"":
                    quote = character
                else:
                    text += character
            name, equals, value = text.removeprefix("--").partition("=")
            assert name not in found, f"{name} twice"
            found[name] = value if equals else None
    return found


def asked(*overrides: str, place: Place = PLACE, **flags: str) -> dict[str, str | None]:
    return directives(render(plan(*overrides, place=place, **flags)))


def test_golden_script() -> None:
    place = dataclasses.replace(PLACE, **WHERE)
    script = render(plan("slurm.setup=[module load cuda]", place=place, nodes="2", gpus_per_node="4", time="12:00:00"))
    missing = "is not there on this node; submit from a shared file system"
    assert script.splitlines() == [
        "#!/bin/bash",
        "",
        "# Parameters",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --job-name=digits",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=/runs/digits-1/slurm-%j.out",
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --time=12:00:00",
        "",
        "# setup",
        "hpc_stop() { trap - EXIT; printf 'hpc: error: %s\\n' \"$1\" >&2; exit 78; }",
        "export PATH PYTHONUTF8=1",
        "umask 0022",
        f"cd -- /work || hpc_stop 'the working directory /work {missing}'",
        "hpc_job=${SLURM_JOB_ID-}",
        "trap 'hpc_stop \"a set-up line ended the batch script\"' EXIT",
        "eval 'module load cuda' || hpc_stop 'set-up line 1 (slurm.setup) failed on this node: module load cuda'",
        '[ "${SLURM_JOB_ID-}" = "$hpc_job" ] || '
        "hpc_stop 'a set-up line (slurm.setup) lost the variable SLURM_JOB_ID; keep the environment of the job'",
        "trap - EXIT",
        'export PYTHONPATH=/toolkit"${PYTHONPATH:+:$PYTHONPATH}"',
        f"cd -- /runs/digits-1/code || hpc_stop 'the copy of the code /runs/digits-1/code {missing}'",
        "",
        "# command",
        "export SUBMITIT_EXECUTOR=slurm",
        "exec /usr/bin/python3 -u -m hpc.launch --run-dir /runs/digits-1 --workdir /work",
    ]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize("key", ["mem", "mem_per_gpu", "mem_per_cpu"])
def test_s01_one_memory_line(key: str) -> None:
    assert [name for name in asked(**{key: "8G"}) if name.startswith("mem")] == [key.replace("_", "-")]


def test_s19_no_memory_line_by_default() -> None:
    assert not any(name.startswith("mem") for name in asked())


def test_s02_one_form_of_gpu_request() -> None:
    forms = {"gpus-per-node", "gres", "gpus", "gpus-per-task"}
    assert {name: value for name, value in asked(gpus_per_node="a100:4").items() if name in forms} == {
        "gpus-per-node": "a100:4"
    }
    gres = asked("slurm.gpu_request=gres", gpus_per_node="a100:4")
    assert {name: value for name, value in gres.items() if name in forms} == {"gres": "gpu:a100:4"}
    both = asked("slurm.gpu_request=gres", "slurm.extra.gres=nvme:1", gpus_per_node="a100:4")
    assert {name: value for name, value in both.items() if name in forms} == {"gres": "gpu:a100:4,nvme:1"}
    assert not forms & asked("slurm.gpus_per_node=null", "launch.workers_per_node=2").keys()
    with pytest.raises(UsageError, match="gpus-per-node"):
        plan("slurm.gpu_request=gpus-per-job")


@pytest.mark.parametrize(
    ("overrides", "tasks", "cores"),
    [
        (["slurm.gpus_per_node=4", "slurm.cpus_per_gpu=6"], "1", "24"),
        (["slurm.gpus_per_node=4", "slurm.cpus_per_task=6"], "1", "6"),
        (["slurm.gpus_per_node=4", "slurm.cpus_per_gpu=6", "launch.layout=task-per-gpu"], "4", "6"),
        (["slurm.gpus_per_node=4", "slurm.cpus_per_task=6", "launch.layout=task-per-gpu"], "4", "6"),
        (["slurm.gpus_per_node=null", "launch.workers_per_node=3", "slurm.cpus_per_gpu=2"], "1", "6"),
        (["slurm.gpus_per_node=null", "launch.workers_per_node=3", "launch.layout=task-per-gpu"], "3", None),
        (["slurm.gpus_per_node=4"], "1", None),
    ],
)
def test_s04_l16_tasks_and_cores_of_each_layout(overrides: list[str], tasks: str, cores: str | None) -> None:
    found = asked(*overrides)
    assert (found["ntasks-per-node"], found.get("cpus-per-task")) == (tasks, cores)
    assert "ntasks" not in found and "cpus-per-gpu" not in found


@pytest.mark.parametrize("layout", ["task-per-node", "task-per-gpu"])
def test_x10_s25_every_gpu_of_a_node_stays_visible(layout: str) -> None:
    script = render(plan(f"launch.layout={layout}", gpus_per_node="4"))
    assert not re.search(r"gpus-per-task|gpu-bind|CUDA_VISIBLE_DEVICES", script)


def test_r15_r23_ranks_are_not_expanded_by_the_batch_shell() -> None:
    script = render(plan(place=dataclasses.replace(PLACE, **WHERE), gpus_per_node="4"))
    assert not re.search(r"PROCID|LOCALID|NODEID|CUDA_VISIBLE_DEVICES", script)


def test_q10_signal_of_the_script_is_the_configured_one() -> None:
    assert asked("slurm.signal=SIGUSR1", "slurm.signal_lead_s=300")["signal"] == "USR1@300"
    with pytest.raises(UsageError, match="USR"):
        plan("slurm.signal=USR9")


@pytest.mark.parametrize("text", ["12:00:00", "1:30:00", "01:30:00", "2-00:00:00", "90", "72:00:00"])
def test_s16_s17_time_is_what_was_written(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a b.yaml"
    file.write_text(f"slurm:\n  time: {text}\n")
    from_file = make_plan(config.load(files=[file], site=False), PLACE)
    assert directives(render(from_file))["time"] == text
    assert asked(f"slurm.time={text}")["time"] == text
    assert asked(time=text)["time"] == text


def test_f03_logs_are_appended_and_requeue_is_said_either_way() -> None:
    found = asked()
    assert found["open-mode"] == "append" and "requeue" in found and "no-requeue" not in found
    found = asked("slurm.requeue=false")
    assert "no-requeue" in found and "requeue" not in found


def test_f01_output_stands_in_the_run_directory_which_is_there_before() -> None:
    found = asked()
    assert found["output"] == "/runs/digits-1/slurm-%j.out" and "error" not in found
    assert asked("slurm.extra.array=0-3%2")["output"] == "/runs/digits-1/slurm-%A_%a.out"
    with pytest.raises(UsageError, match="output"):
        plan("slurm.extra.output=logs/%j/out.txt")


@pytest.mark.parametrize(
    ("run_dir", "output"),
    [
        ("/my runs (v2)/añejo-实验", "/my runs (v2)/añejo-实验/slurm-%j.out"),
        ("/50%j/a", "/50%%j/a/slurm-%j.out"),  # %% is a percent sign, %j the job's id
        ("/a\\b%j", "/a\\\\b%j/slurm.out"),  # a backslash escapes, and no pattern is expanded any more
    ],
)
def test_s13_s15_paths_that_slurm_would_read_as_patterns(run_dir: str, output: str) -> None:
    assert asked(place=dataclasses.replace(PLACE, run_dir=Path(run_dir)))["output"] == output


def test_extra_options_and_no_key_of_submitits() -> None:
    found = asked("slurm.extra.mail-type=END", "slurm.extra.exclusive=true", "slurm.extra.nice=null")
    assert found["mail-type"] == "END" and found["exclusive"] is None and "nice" not in found
    assert not {"wckey", "error", "time", "comment"} & found.keys()
    assert asked("slurm.extra.wckey=mine")["wckey"] == "mine"


@pytest.mark.parametrize("name", ['it\'s "q" \\ # $(x)', "dédé 实验", "a\\", "x=1;y", "100%j"])
def test_s15_directives_are_read_as_meant(name: str) -> None:
    loaded = config.load(flags={"name": name}, site=False)
    assert directives(render(make_plan(loaded, PLACE)))["job-name"] == name


# --- the script under bash -------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Place:
    """A place whose interpreter writes down its arguments and its environment."""
    python = tmp_path / "my python"
    python.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@" >"$REPORT"\npwd >>"$REPORT"\nenv >"$REPORT.env"\nexit ${CODE:-0}\n'
    )
    python.chmod(0o755)
    for name in ("work dir", "run dir/code/sub", "tool kit"):
        (tmp_path / name).mkdir(parents=True)
    return Place(
        run_dir=tmp_path / "run dir",
        workdir=tmp_path / "work dir",
        python=str(python),
        toolkit=tmp_path / "tool kit",
        code=tmp_path / "run dir/code/sub",
    )


def run(script: str, place: Place, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with nothing but the given variables, as `env -i bash script`."""
    file = place.run_dir / "job.sh"
    file.write_text(script, encoding="utf-8")
    report = place.run_dir / "report"
    report.unlink(missing_ok=True)
    environ = {"REPORT": str(report), **variables}
    return subprocess.run(
        ["/bin/bash", str(file)], env=environ, cwd=place.run_dir.parent, capture_output=True, text=True, timeout=20
    )


def test_x06_x07_script_runs_under_an_empty_environment(here: Place) -> None:
    done = run(render(plan(place=here)), here)
    assert (done.returncode, done.stderr) == (0, "")
    report = (here.run_dir / "report").read_text().splitlines()
    assert report == [
        "-u",
        "-m",
        "hpc.launch",
        "--run-dir",
        str(here.run_dir),
        "--workdir",
        str(here.workdir),
        str(here.code),
    ]
    environ = (here.run_dir / "report.env").read_text().splitlines()
    assert f"PYTHONPATH={here.toolkit}" in environ and "PYTHONUTF8=1" in environ
    assert any(line.startswith("PATH=/") for line in environ)


def test_pythonpath_of_the_user_stays_behind_the_toolkit(here: Place) -> None:
    assert run(render(plan(place=here)), here, PYTHONPATH="/mine:/too").returncode == 0
    assert f"PYTHONPATH={here.toolkit}:/mine:/too" in (here.run_dir / "report.env").read_text().splitlines()


def test_f04_exit_code_is_the_controllers(here: Place) -> None:
    assert run(render(plan(place=here)), here, CODE="42").returncode == 42


@pytest.mark.parametrize(
    "line", ["false", "no-such-command-here x", "cd /nowhere/at/all", "echo 'open", "source /nowhere/env", "(exit 3)"]
)
def test_x06_failing_setup_line_ends_the_job_and_is_named(here: Place, line: str) -> None:
    done = run(render(make_plan(_with_setup(line), here)), here)
    assert done.returncode == 78 and not (here.run_dir / "report").exists()
    assert done.stderr.splitlines()[-1] == f"hpc: error: set-up line 2 (slurm.setup) failed on this node: {line}"


def test_setup_lines_share_one_shell(here: Place) -> None:
    lines = ["export A=1 # a remark", "B=$A; export B", "declare -A map; map[x]=7; export C=${map[x]}", "cd /"]
    assert run(render(make_plan(_with_setup(*lines), here)), here).returncode == 0
    environ = (here.run_dir / "report.env").read_text().splitlines()
    assert {"A=1", "B=1", "C=7"} <= set(environ)


def test_setup_line_that_sources_an_exit_does_not_end_the_job_as_done(here: Place) -> None:
    (here.workdir / "env.sh").write_text("exit 0\n")
    done = run(render(make_plan(_with_setup("source ./env.sh"), here)), here)
    assert done.returncode == 78 and "a set-up line ended the batch script" in done.stderr


def test_s22_lost_environment_is_named(here: Place) -> None:
    with pytest.raises(UsageError, match="exec"):
        _with_setup("exec env -i bash -l")
    lost = make_plan(_with_setup("unset ${!SLURM_*}"), here)
    done = run(render(lost), here, SLURM_JOB_ID="7")
    assert done.returncode == 78 and "SLURM_JOB_ID" in done.stderr
    assert run(render(plan(place=here)), here, SLURM_JOB_ID="7", SLURM_EXPORT_ENV="NONE").returncode == 0


def _with_setup(*lines: str) -> config.Loaded:
    return config.load(flags={"slurm.setup": ["true", *lines]}, site=False)


@pytest.mark.parametrize("missing", ["workdir", "code"])
def test_directory_that_a_node_does_not_have_is_named(here: Place, missing: str) -> None:
    path = here.run_dir / "gone's"
    done = run(render(plan(place=dataclasses.replace(here, **{missing: path}))), here)
    assert done.returncode == 78 and str(path) in done.stderr and len(done.stderr.splitlines()) == 2


# --- hostile values --------------------------------------------------------------------------------------------------

PAYLOADS = [
    "\n{}\n", "\r{}", "x\r\n{}", "\0{}", "\u2028{}", "\u2029{}", "\x85{}", "\v{}", "\f{}", "\x1b[31m{}", "\udcff{}",
    "$({})", "`{}`", ";{};", "&& {}", "| {}", "'; {}; '", "\"; {}; \"", "'\"'; {}", "\\'; {} #", "\\\"; {} #", "\\",
    "x\\\n{}", "#SBATCH --wrap={}", "\n#SBATCH --wrap='{}'", "${{IFS}}$({})", "$'\\n{}'", "<({})", ">({})", "{{a,$({})}}",
    "-{}", "--wrap={}", "%j$({})", "%", "~root/$({})", "!{}", "*", "x y $({})", "é实 $({})", "$({})" + "x" * 9000,
]  # fmt: skip
FIELDS = [
    "name", "slurm.partition", "slurm.account", "slurm.qos", "slurm.constraint", "slurm.exclude", "slurm.nodelist",
    "slurm.reservation", "slurm.time", "slurm.mem", "slurm.signal", "slurm.extra.comment", "slurm.extra.dependency",
    "slurm.gpus_per_node", "launch.python", "command",
]  # fmt: skip


@pytest.mark.slow
def test_s1_500_hostile_values_are_refused_or_inert(here: Place) -> None:
    refused, inert = _try_all(FIELDS, here)
    assert refused + inert == len(FIELDS) * len(PAYLOADS) >= 500
    assert inert > 50 and refused > 200


def test_s1_hostile_names_are_refused_or_inert(here: Place) -> None:
    refused, inert = _try_all(["name"], here)
    assert refused > 5 and inert > 5


def _try_all(fields: list[str], here: Place) -> tuple[int, int]:
    command = "touch CANARY"
    refused = inert = 0
    for field, payload in itertools.product(fields, PAYLOADS):
        value = payload.format(command)
        try:
            given = {} if field == "command" else {field: value}
            loaded = config.load(command=["train.py", value] if field == "command" else (), flags=given, site=False)
            script = render(make_plan(loaded, here))
        except UsageError as error:
            assert error.exit_code == 2
            refused += 1
            continue
        if "\udcff" in script:
            pytest.fail(f"{field}: {value!r} is no text")
        done = run(script, here)
        assert done.returncode == 0, (field, value, done.stderr)
        directives(script)
        inert += 1
        assert not list(here.run_dir.parent.rglob("CANARY*")), (field, value)
    return refused, inert


@pytest.mark.slow
@pytest.mark.parametrize("part", ["workdir", "run_dir", "toolkit", "python", "code"])
def test_s1_hostile_paths_are_refused_or_inert(here: Place, part: str, tmp_path: Path) -> None:
    canary = tmp_path / "CANARY"
    for payload in PAYLOADS:
        name = payload.format("touch CANARY").replace("/", "_")[:120]
        try:
            path = tmp_path / name
            if part == "python":
                os.symlink(here.python, path)
            else:
                path.mkdir(exist_ok=True)
        except (ValueError, OSError):
            continue  # no file system takes it
        value: object = str(path) if part == "python" else path
        place = dataclasses.replace(here, **{part: value})
        try:
            script = render(plan(place=place))
        except UsageError as error:
            assert "\n" not in str(error) and error.exit_code == 2
            continue
        done = run(script, here if part == "run_dir" else place)
        assert done.returncode == 0, (path, done.stderr)
        assert not canary.exists() and not (here.workdir / "CANARY").exists()
        for directory in (tmp_path, here.workdir, path if part in ("workdir", "code") else tmp_path):
            assert not (directory / "CANARY").exists(), path
