"""What the values of the toolkit's settings may be, beyond their types; refused here, before anything is made or sent.

The numbers of the training loop are checked by `TrainConfig` itself, a job's parameters by the job's `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpc import quantities
from hpc.errors import ConfigError
from hpc.fields import one_of
from hpc.schema import Config

CHOICES = {
    "slurm.gpu_request": ("gpus-per-node", "gres"),
    "launch.layout": ("task-per-node", "task-per-gpu"),
    "launch.code": ("snapshot", "live"),
    "launch.preflight": ("quick", "full"),
}

RANGES: dict[str, tuple[float, float]] = {
    "slurm.nodes": (1, 100_000),
    "slurm.cpus_per_gpu": (1, 100_000),
    "slurm.cpus_per_task": (1, 100_000),
    "slurm.exclude_failed_h": (0, 720),
    "slurm.signal_lead_s": (0, 65_535),  # sbatch(1), --signal
    "launch.workers_per_node": (1, 1024),
    "launch.rendezvous_timeout_s": (1, 86_400),
    "launch.grace_s": (0, 3600),
    "launch.hang_timeout_s": (0, 86_400),
    "launch.slow_after_s": (1, 86_400),
    "launch.max_restarts": (0, 1000),
    "launch.retry_failures": (0, 1000),
}
"""Smallest and largest value that can be meant."""

EXCLUSIVE = (("mem", "mem_per_gpu", "mem_per_cpu"), ("cpus_per_gpu", "cpus_per_task"))
"""Settings of slurm of which sbatch takes one; in a later file or on the command line one takes the others' place."""

_READERS: dict[str, Callable[[str], str]] = {
    "slurm.time": quantities.slurm_time,
    "slurm.mem": quantities.slurm_memory,
    "slurm.mem_per_gpu": quantities.slurm_memory,
    "slurm.mem_per_cpu": quantities.slurm_memory,
    "slurm.gpus_per_node": quantities.slurm_gpus,
    "slurm.signal": quantities.signal_name,
}
_WORDS = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation")
_NEVER_IN_A_WORD = frozenset("'\"\\`$;<>#%")
_LONGEST_NAME_BYTES = 200
_LONGEST_TEXT = 8192
_LEAVES_THE_SHELL = ("exec", "exit", "return", "logout", "kill")
_EXEC_LATER = re.compile(r"(?:[;&|({]|\b(?:then|else|do))\s*exec\s+(?![<>&{]|[0-9]*[<>])")
"""`exec` of a program, not of a redirection, behind another command: the batch script would end there, as a success."""

_OWNED = {
    "job-name": "name",
    "nodes": "slurm.nodes",
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "mem": "slurm.mem",
    "mem-per-cpu": "slurm.mem_per_cpu",
    "mem-per-gpu": "slurm.mem_per_gpu",
    "cpus-per-task": "slurm.cpus_per_task",
    "cpus-per-gpu": "slurm.cpus_per_gpu",
    "constraint": "slurm.constraint",
    "exclude": "slurm.exclude",
    "nodelist": "slurm.nodelist",
    "reservation": "slurm.reservation",
    "signal": "slurm.signal and slurm.signal_lead_s",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue=false",
    "gpus": "slurm.gpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "gpus-per-task": "slurm.gpus_per_node (asked for by task, GPUs of a node cannot reach each other)",
    "gpus-per-socket": "slurm.gpus_per_node",
    "ntasks": "launch.layout and launch.workers_per_node",
    "ntasks-per-node": "launch.layout and launch.workers_per_node",
    "ntasks-per-gpu": "launch.layout and launch.workers_per_node",
    "ntasks-per-core": "launch.layout and launch.workers_per_node",
    "ntasks-per-socket": "launch.layout and launch.workers_per_node",
    "output": "run_root (the output stands in the run directory)",
    "error": "run_root (the output stands in the run directory)",
    "open-mode": "nothing: every attempt is appended",
    "chdir": "nothing: submit from the directory in which the job is to run",
    "export": 'slurm.setup, with lines such as "export NAME=value"',
    "export-file": 'slurm.setup, with lines such as "export NAME=value"',
    "wrap": "a command after --",
    "test-only": "--dry-run",
    "wait": "--follow",
    "parsable": "nothing: the job id is printed",
    "quiet": "nothing",
    "verbose": "nothing",
    "help": "nothing",
    "usage": "nothing",
    "version": "nothing",
}
"""Options of sbatch that follow from other settings, and what to use instead."""

_OTHERS = """acctg-freq array batch bb bbf begin cluster-constraint clusters comment consolidate-segments container container-id
contiguous core-spec cores-per-socket cpu-freq deadline delay-boot dependency exclusive external-launcher extra
extra-node-info get-user-env gid gpu-bind gpu-freq gres gres-flags hint hold ignore-pbs input kill-on-invalid-dep licenses
mail-type mail-user mcs-label mem-bind mincpus network nice no-kill nodefile oom-kill-step overcommit oversubscribe power
prefer priority profile propagate reboot resv-ports segment sockets-per-node spread-job spread-segments stepmgr switches
thread-spec threads-per-core time-min tmp tres-bind tres-per-job tres-per-task uid use-min-nodes wait-all-nodes
wckey x11""".split()
"""The other options of sbatch, 22.05 to 25.05; one that is not here is let through unless it looks like a slip."""


def checked(config: Config, origins: Mapping[str, str]) -> Config:
    """The configuration with times, memory, GPUs, signals and extra options in Slurm's own notation.

    `origins` says where a setting was written, by dotted name, for messages.

    Raises:
        ConfigError: a value that cannot be meant, or that could run as something else in a script.
    """

    def refuse(path: str, value: Any, needed: str) -> ConfigError:
        shown = repr(value) if isinstance(value, str) and len(value) <= 80 else _short(value)
        return ConfigError(f"{path}={shown} ({origins.get(path, 'default')}): needs {needed}")

    for path, value in _flat(config):
        needed = _fault(path, value)
        if needed:
            raise refuse(path, value, needed)
    changes: dict[str, Any] = {}
    for path, reader in _READERS.items():
        value = getattr(config.slurm, path.partition(".")[2])
        if value is not None:
            try:
                changes[path.partition(".")[2]] = reader(value)
            except ValueError as error:
                raise refuse(path, value, str(error)) from None
    for group in EXCLUSIVE:
        given = [name for name in group if getattr(config.slurm, name) is not None]
        if len(given) > 1:
            both = " and ".join(f"slurm.{name}={getattr(config.slurm, name)}" for name in given)
            places = " and ".join(dict.fromkeys(origins.get(f"slurm.{name}", "default") for name in given))
            raise ConfigError(f"{both} ({places}): needs one of them; set the other to null")
    changes["extra"] = _extra_options(config, refuse)
    return dataclasses.replace(
        config,
        run_root=_home(config.run_root),
        run_dir=None if config.run_dir is None else _home(config.run_dir),
        slurm=dataclasses.replace(config.slurm, **changes),
    )


def _flat(config: Config) -> Iterator[tuple[str, Any]]:
    """All settings by dotted name; items of a list under the list's name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        group = {field.name: value}
        if dataclasses.is_dataclass(value):
            group = {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
        for path, setting in group.items():
            for item in setting if isinstance(setting, list) else [setting]:
                yield path, item


def _fault(path: str, value: Any) -> str | None:
    """What a value lacks, or None when it can be meant."""
    if path in CHOICES and value not in CHOICES[path]:
        return one_of(str(value), CHOICES[path])
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if path in RANGES and value is not None:
        least, most = RANGES[path]
        if not least <= value <= most:
            return f"at least {least}" if value < least else f"at most {most}"
    if not isinstance(value, str):
        return None
    if path == "command":
        return "arguments without a NUL character" if "\0" in value else None
    fault = _unprintable(value.replace("\t", " ") if path == "slurm.setup" else value)
    if fault or path not in _TEXT_RULES:
        return fault
    return _TEXT_RULES[path](value)


def _unprintable(text: str) -> str | None:
    if not text.isprintable():
        bad = next(c for c in text if not c.isprintable())
        return f"one line of printable text, found the character U+{ord(bad):04X}"
    return f"at most {_LONGEST_TEXT} characters" if len(text) > _LONGEST_TEXT else None


def _name(text: str) -> str | None:
    if text.strip() in ("", ".", "..") or "/" in text or text.startswith("-"):
        return "a name that can be a directory's: no /, no dash in front, not only dots or blanks"
    size = len(text.encode())
    return f"a name of at most {_LONGEST_NAME_BYTES} bytes, not {size}" if size > _LONGEST_NAME_BYTES else None


def _word(text: str) -> str | None:
    """A name of something in the cluster: sbatch's own commas, brackets and & stay possible."""
    if not text or text.startswith("-"):
        return "a name without a dash in front"
    if any(c.isspace() for c in text):
        return "a name without blanks"
    bad = sorted(_NEVER_IN_A_WORD.intersection(text))
    return f"a name without {' '.join(bad)}" if bad else None


def _path(text: str) -> str | None:
    return "a path" if not text.strip() else None


def _program(text: str) -> str | None:
    return "the path of a Python interpreter" if not text.strip() or text.startswith("-") else None


def _module(text: str) -> str | None:
    return None if all(part.isidentifier() for part in text.split(".")) else "a module's name, such as package.module"


def _setup_line(text: str) -> str | None:
    word = re.split(r"[\s;&|]", text.strip(), maxsplit=1)[0]
    word = "exec" if _EXEC_LATER.search(text) else word
    if word in _LEAVES_THE_SHELL:
        return f"a shell line after which the script goes on; {word} would end it before Python starts"
    if text.strip().upper().startswith("#SBATCH"):
        return "a shell line; an option of sbatch goes into slurm.extra.NAME=VALUE"
    return None


_TEXT_RULES: dict[str, Callable[[str], str | None]] = {
    "name": _name,
    "run_root": _path,
    "run_dir": _path,
    "launch.python": _program,
    "launch.preload": _module,
    "slurm.setup": _setup_line,
    **{f"slurm.{word}": _word for word in _WORDS},
}


def _extra_options(config: Config, refuse: Callable[[str, Any, str], ConfigError]) -> dict[str, str | bool | None]:
    """slurm.extra with dashes for underscores, each option checked."""
    options: dict[str, str | bool | None] = {}
    for key, value in config.slurm.extra.items():
        path = f"slurm.extra.{key}"
        option = key.replace("_", "-")
        fault = _option_fault(option, value, config)
        if option in options:
            fault = "each option once; it is given with a dash and with an underscore"
        if fault is None and isinstance(value, str):
            fault = _unprintable(value)
        if fault:
            raise refuse(path, value, fault)
        options[option] = value
    return options


def _option_fault(option: str, value: Any, config: Config) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", option, re.ASCII) or len(option) > 64:
        return "the long name of an option of sbatch, such as mail-type, in lower case"
    if option in _OWNED:
        return f"another setting: --{option} follows from {_OWNED[option]}"
    if option in ("gres", "tres-per-job", "tres-per-task") and "gpu" in str(value):
        return "another setting: GPUs are asked for with slurm.gpus_per_node and slurm.gpu_request"
    if option in _OTHERS:
        return None
    longer = [name for name in (*_OWNED, *_OTHERS) if name.startswith(option)]  # sbatch takes abbreviations
    if longer:
        return f"the whole name of the option: {' or '.join(longer[:3])}"
    close = difflib.get_close_matches(option, (*_OWNED, *_OTHERS), n=1, cutoff=0.85)
    return f"an option of sbatch; did you mean {close[0]}?" if close else None


def _home(path: str) -> str:
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
