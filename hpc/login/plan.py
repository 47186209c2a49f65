"""What will be sent to the cluster, decided whole before anything is made: dry run, submission and tests take the same.

No value of the user reaches the script unquoted, except the set-up lines, which are shell by intent: each stands in
quotes behind `eval`, so that a line that does not end (a quote, a backslash) cannot swallow the next one.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from hpc import exitcodes
from hpc.config import Loaded
from hpc.errors import ConfigError, UsageError, printable
from hpc.quantities import gpu_request
from hpc.schema import Config, SlurmConfig

VALUE_LIMIT = 8192
ARRAY_LIMIT = 10_000


@dataclass(frozen=True, kw_only=True)
class Place:
    """Facts of the machine that submits."""

    run_dir: Path
    workdir: Path
    """The directory of the submission."""
    python: str
    """The interpreter for the batch step, absolute."""
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
    array: tuple[int, ...]
    """The indices of a job array; empty for a plain job."""
    config_yaml: str
    notes: tuple[str, ...]
    """Lines for the user about what may not be meant."""

    @property
    def run_dir(self) -> Path:
        return self.place.run_dir

    def element_directory(self, index: int) -> Path:
        """The run directory of one element of an array."""
        return self.run_dir / f"array-{index}"

    def setup_lines(self) -> list[str]:
        """The part of the batch script between the directives and the command: bash, one command per line."""
        place = self.place
        workdir = shlex.quote(str(place.workdir))
        lines = [
            f"hpc_stop() {{ trap - EXIT; printf 'hpc: error: %s\\n' \"$1\" >&2; exit {exitcodes.BAD_ENVIRONMENT}; }}",
            "export PATH PYTHONUTF8=1",
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

    def command(self) -> str:
        """The words after the interpreter, as bash reads them; the element's directory is chosen by Slurm's index."""
        words = [shlex.quote(word) for word in self.argv[1:]]
        if self.array:
            words[words.index("--run-dir") + 1] += '/array-"$SLURM_ARRAY_TASK_ID"'
        return " ".join(words)


def make_plan(loaded: Loaded, place: Place) -> Plan:
    """The plan for a checked configuration. Pure: reads no file, no variable, no clock.

    Raises:
        ConfigError: a value that no script may hold.
        UsageError: a path with a character that no script may hold.
    """
    config = loaded.config
    for what, path in (("working directory", place.workdir), ("run directory", place.run_dir)):
        _check_path(what, str(path))
    _check_path("interpreter (launch.python)", place.python)
    if place.toolkit is not None:
        _check_path("toolkit's directory", str(place.toolkit))
        if ":" in str(place.toolkit):
            raise UsageError(f"the toolkit's directory {place.toolkit} holds a colon, which PYTHONPATH cannot; move it")
    name = run_name(config)
    extra = _extra(config.slurm)
    array = expand_array(extra["array"] or "") if "array" in extra else ()
    directives = {"job-name": name, **_request(config), **extra, **_output(place.run_dir, array=bool(array))}
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
        array=array,
        config_yaml=loaded.to_yaml(),
        notes=(),
    )


def run_name(config: Config) -> str:
    """The job's name: the given one, else that of the training job, the script or the module that runs."""
    if config.name is not None:
        name = config.name
    elif config.command:
        words = list(config.command)
        if re.fullmatch(r"python[0-9.]*", Path(words[0]).name) and len(words) > 1:
            words = words[2:] if words[1] == "-m" and len(words) > 2 else words[1:]
        name = Path(words[0]).name.removesuffix(".py") or "command"
    else:
        name = config.job.rpartition(".")[2]
    return name


def directory_name(name: str) -> str:
    """The job's name as part of a directory name: letters, digits, "._-" kept, all else "_", at most 60 characters."""
    return re.sub(r"[^\w.-]", "_", name)[:60].lstrip("-.") or "run"


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


def expand_array(text: str) -> tuple[int, ...]:
    """The indices of sbatch's --array: "0-3", "1,3,5-9:2", "0-99%4" (at most so many at once), in order.

    Raises:
        ConfigError: not in sbatch's notation, or more than 10,000 elements.
    """
    indices: list[int] = []
    body, limit, most = text.partition("%")
    good = not limit or re.fullmatch(r"[1-9][0-9]{0,8}", most) is not None
    for part in body.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?", part, re.ASCII)
        if match is None or not good:
            raise ConfigError(f"slurm.extra.array={printable(text[:80])}: needs indices such as 0-3, 1,3,5 or 0-99%4")
        first = int(match[1])
        elements = range(first, int(match[2] or first) + 1, int(match[3] or 1))
        if not elements or len(indices) + len(elements) > ARRAY_LIMIT:
            raise ConfigError(
                f"slurm.extra.array={printable(text[:80])}: needs ranges that run forward, {ARRAY_LIMIT:,} elements at most"
            )
        indices += elements
    return tuple(sorted(set(indices)))


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


def _output(run_dir: Path, *, array: bool) -> dict[str, str | None]:
    """Where the batch step's screen goes: a file in the run directory, which exists before sbatch is called.

    Source: sbatch(1), "FILENAME PATTERN": "%%" is a percent sign; one backslash switches all patterns off and is
    dropped, so that such a directory is given as the job's own and the file relative to it.
    """
    name = "slurm-%A_%a.out" if array else "slurm-%j.out"
    if "\\" in str(run_dir):
        return {"chdir": str(run_dir), "output": name}
    return {"output": str(run_dir).replace("%", "%%") + f"/{name}"}


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
