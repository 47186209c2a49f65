"""What will be sent to the cluster, decided whole before anything is made: dry run, submission and tests take the same.

No value of the user reaches the script unquoted, except the set-up lines, which are shell by intent: each stands in
quotes behind `eval`, so that a line that does not end (a quote, a backslash) cannot swallow the next one.
"""

from __future__ import annotations

import shlex
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from hpc import exitcodes
from hpc.config import Loaded
from hpc.errors import ConfigError, UsageError, printable
from hpc.quantities import gpu_request
from hpc.rundir import run_name
from hpc.schema import Config, SlurmConfig

VALUE_LIMIT = 8192


@dataclass(frozen=True, kw_only=True)
class Place:
    """Facts of the machine that submits."""

    run_dir: Path
    workdir: Path
    """The directory of the submission."""
    python: str
    """The interpreter for the batch step, absolute."""
    umask: int = 0o022
    """The user's file mode mask, for the job's own files; sbatch itself runs with 077, for the output file."""
    toolkit: Path | None = None
    """The directory to put on PYTHONPATH; None where hpc is installed."""
    code: Path | None = None
    """The copy of the working directory that a training job runs from; None for the files themselves."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that will be sent. `directives` are long options of sbatch in order; None is an option without a value."""

    name: str
    place: Place
    directives: tuple[tuple[str, str | None], ...]
    setup: tuple[str, ...]
    """The user's set-up lines, as written."""
    argv: tuple[str, ...]
    """The command that becomes the batch step."""
    config_yaml: str
    notes: tuple[str, ...]
    """Lines for the user about what may not be meant."""

    @property
    def run_dir(self) -> Path:
        return self.place.run_dir

    def setup_lines(self) -> list[str]:
        """The part of the batch script between the directives and the command: bash, one command per line."""
        place = self.place
        workdir = shlex.quote(str(place.workdir))
        lines = [
            f"hpc_stop() {{ trap - EXIT; printf 'hpc: error: %s\\n' \"$1\" >&2; exit {exitcodes.BAD_ENVIRONMENT}; }}",
            "export PATH PYTHONUTF8=1",
            f"umask {place.umask:04o}",
            f"cd -- {workdir} || hpc_stop {_missing(place.workdir, 'working directory')}",
        ]
        if self.setup:
            lines += ["hpc_job=${SLURM_JOB_ID-}", "trap 'hpc_stop \"a set-up line ended the batch script\"' EXIT"]
            for number, line in enumerate(self.setup, 1):
                failed = f"set-up line {number} (slurm.setup) failed on this node: {printable(line)}"
                lines.append(f"eval {shlex.quote(line)} || hpc_stop {shlex.quote(failed)}")
            lost = "a set-up line (slurm.setup) lost the variable SLURM_JOB_ID; keep the environment of the job"
            lines.append(f'[ "${{SLURM_JOB_ID-}}" = "$hpc_job" ] || hpc_stop {shlex.quote(lost)}')
            lines.append("trap - EXIT")
        if place.toolkit is not None:
            lines.append(f'export PYTHONPATH={shlex.quote(str(place.toolkit))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        if place.code is not None:
            lines.append(f"cd -- {shlex.quote(str(place.code))} || hpc_stop {_missing(place.code, 'copy of the code')}")
        return lines


def make_plan(loaded: Loaded, place: Place) -> Plan:
    """The plan for a checked configuration. Pure: reads no file, no variable, no clock.

    Raises:
        ConfigError: a value that no script may hold.
        UsageError: a path with a character that no script may hold.
    """
    config = loaded.config
    paths = {
        "working directory": place.workdir,
        "run directory": place.run_dir,
        "interpreter (launch.python)": place.python,
        "toolkit's directory": place.toolkit,
        "copy of the code": place.code,
    }
    for what, path in paths.items():
        if path is not None:
            _check_path(what, str(path))
    if ":" in str(place.toolkit):
        raise UsageError(f"the toolkit's directory {place.toolkit} holds a colon, which PYTHONPATH cannot; move it")
    name = run_name(config)
    extra = _extra(config.slurm)
    output = _output(place.run_dir, array="array" in extra)
    request = _request(config)
    if request.get("gres") and extra.get("gres"):
        extra["gres"] = f"{request['gres']},{extra['gres']}"  # sbatch takes one list of them
    directives = {"job-name": name, "output": output, **request, **extra}
    for key, value in directives.items():
        if value is not None:
            check_text(f"--{key}", value)
    for line in config.slurm.setup:
        check_text("slurm.setup", line.replace("\t", " "))
    argv = [place.python, "-u", "-m", "hpc.launch", "--run-dir", str(place.run_dir)]
    if place.code is not None:
        argv += ["--workdir", str(place.workdir)]
    return Plan(
        name=name,
        place=place,
        directives=tuple(sorted(directives.items())),
        setup=tuple(config.slurm.setup),
        argv=tuple(argv),
        config_yaml=loaded.to_yaml(),
        notes=(),
    )


def check_text(what: str, text: str) -> None:
    """Refuse what could end a line of the script, or be read otherwise by bash, sbatch and people.

    Raises:
        ConfigError: empty, too long, a control character, a line or paragraph separator, or not UTF-8.
    """
    if not text.strip():
        raise ConfigError(f"{what} is empty; give it a value or leave it out")
    if len(text) > VALUE_LIMIT:
        raise ConfigError(f"{what} has {len(text)} characters; needs at most {VALUE_LIMIT}")
    if (bad := _forbidden(text)) is not None:
        raise ConfigError(f"{what}={printable(text[:80])}: the character {bad} cannot stand in a batch script")


def _request(config: Config) -> dict[str, str | None]:
    """What is asked of Slurm, by sbatch's long option names; nothing that the user did not ask for."""
    slurm = config.slurm
    gpus = gpu_request(slurm.gpus_per_node)[1] if slurm.gpus_per_node is not None else 0
    workers = config.launch.workers_per_node or gpus or 1
    tasks = workers if config.launch.layout == "task-per-gpu" else 1
    wanted: dict[str, str | None] = {
        "nodes": str(slurm.nodes),
        "ntasks-per-node": str(tasks),
        "signal": f"{slurm.signal}@{slurm.signal_lead_s}",
        "open-mode": "append",
        ("requeue" if slurm.requeue else "no-requeue"): None,
    }
    if slurm.gpus_per_node is not None:
        if slurm.gpu_request == "gres":
            wanted["gres"] = f"gpu:{slurm.gpus_per_node}"
        else:
            wanted["gpus-per-node"] = slurm.gpus_per_node
    if slurm.cpus_per_gpu is not None:
        wanted["cpus-per-task"] = str(slurm.cpus_per_gpu * ((gpus or workers) if tasks == 1 else 1))
    elif slurm.cpus_per_task is not None:
        wanted["cpus-per-task"] = str(slurm.cpus_per_task)
    words = ("time", "partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation")
    for key in (*words, "mem", "mem_per_gpu", "mem_per_cpu"):
        value = getattr(slurm, key)
        if value is not None:
            wanted[key.replace("_", "-")] = str(value)
    return wanted


def output_file(run_dir: Path, job_id: str) -> Path:
    """Where the batch step's screen goes; of an array `job_id` is a pattern. See `_output` for the second name."""
    return run_dir / ("slurm.out" if "\\" in str(run_dir) else f"slurm-{job_id}.out")


def _output(run_dir: Path, *, array: bool) -> str:
    """--output: a file in the run directory, which exists before sbatch is called.

    Source: sbatch(1), "FILENAME PATTERN": "%%" is a percent sign; a backslash switches all patterns off and escapes
    what follows (seen with 22.05.8), so that the file's name cannot hold the job's id then.
    """
    if "\\" in str(run_dir):
        return str(output_file(run_dir, "")).replace("\\", "\\\\")
    directory = Path(str(run_dir).replace("%", "%%"))
    return str(output_file(directory, "%A_%a" if array else "%j"))


def _extra(slurm: SlurmConfig) -> dict[str, str | None]:
    """The user's other options, by long name (hpc/rules.py knows which may be given)."""
    given = {key: value for key, value in slurm.extra.items() if value is not None and value is not False}
    return {key: None if value is True else str(value) for key, value in given.items()}


def _check_path(what: str, path: str) -> None:
    if not path.startswith("/"):
        raise UsageError(f"the {what} {printable(path[:200])} is not absolute; an absolute path was needed")
    if (bad := _forbidden(path)) is not None:
        raise UsageError(f"the {what} {printable(path[:200])}: the character {bad} cannot stand in a batch script")
    if len(path) > VALUE_LIMIT:
        raise UsageError(f"the {what} has {len(path)} characters; a path of at most {VALUE_LIMIT} was needed")


def _forbidden(text: str) -> str | None:
    """The first character that is a control, a line or paragraph separator, or no character at all."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            return f"U+{ord(character):04X}"
    return None


def _missing(path: Path, what: str) -> str:
    """The message for a directory that a node does not have, quoted for bash."""
    return shlex.quote(f"the {what} {path} is not there on this node; submit from a shared file system")
