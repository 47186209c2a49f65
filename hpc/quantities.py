"""Times, memory, GPU counts and signals as Slurm takes them: read strictly, handed on in one notation.

Every reader takes the text that the user wrote and raises ValueError with what was needed; the caller adds the name of
the setting and where it was written.
"""

from __future__ import annotations

import difflib
import re
from fractions import Fraction

TIME_NOTATIONS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
_TIME_FORMS = (
    re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?", re.ASCII),
    re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)", re.ASCII),
    re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?", re.ASCII),
)
_LONGEST_S = 2**31 - 1  # slurm keeps a limit in an int of seconds while it reads one

_MEMORY = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_UNITS = "KMGT"

_GPUS = re.compile(r"(?:(?P<type>[A-Za-z0-9_][A-Za-z0-9_.+-]*):)?(?P<count>[0-9]+)", re.ASCII)
_MOST_GPUS = 1024

WARNING_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP", "QUIT", "CONT", "ALRM", "XCPU")
_LONGEST_LEAD_S = 65535


def slurm_time(text: str) -> str:
    """A time limit as sbatch takes it for exactly what was written: "12:00:00", "90", "2-00:00:00", "UNLIMITED".

    Raises:
        ValueError: none of Slurm's notations, a limit of no time, or more than 68 years.
    Source: sbatch(1), --time.
    """
    minutes = slurm_minutes(text)
    return text.strip() if minutes else "UNLIMITED"


def slurm_minutes(text: str) -> int:
    """The minutes of a time limit, a started minute counted as whole as Slurm does; 0 is no limit.

    "90" and "1:30:00" and "90:00" give 90, "72:00:00" gives 4320.

    Raises:
        ValueError: as `slurm_time`.
    """
    bare = text.strip()
    if bare.upper() in ("UNLIMITED", "INFINITE", "0"):
        return 0
    if len(bare) <= 40:
        for form in _TIME_FORMS:
            match = form.fullmatch(bare)
            if match:
                return _minutes({unit: int(digits) for unit, digits in match.groupdict().items() if digits})
    raise ValueError(f"a time limit as {TIME_NOTATIONS}")


def _minutes(parts: dict[str, int]) -> int:
    seconds = parts.get("s", 0) + 60 * (parts.get("m", 0) + 60 * (parts.get("h", 0) + 24 * parts.get("d", 0)))
    if seconds == 0:
        raise ValueError("a time limit above zero; for no limit write UNLIMITED")
    if seconds > _LONGEST_S:
        raise ValueError("a time limit of at most 68 years; for no limit write UNLIMITED")
    return -(-seconds // 60)


def slurm_memory(text: str) -> str:
    """An amount of memory as sbatch takes it, a whole number with K, M, G or T: "64 GiB" gives "64G".

    Units are powers of 1024 however they are spelt, as Slurm's are; a bare number is MiB. A fraction is
    written in the next smaller unit when it is whole there ("1.5T" gives "1536G").

    Raises:
        ValueError: not an amount, or a fraction that is not whole in a smaller unit.
    Source: sbatch(1), --mem.
    """
    match = _MEMORY.fullmatch(text.strip())
    if not match or len(text) > 40:
        raise ValueError("an amount of memory with its unit K, M, G or T: 64G")
    whole, fraction, unit = match[1], match[2] or "", match[3].upper()
    if not unit and re.search("b", text, re.IGNORECASE):
        raise ValueError("an amount of memory with its unit K, M, G or T: 64G (bytes are not counted singly)")
    amount = int(whole) + (Fraction(int(fraction), 10 ** len(fraction)) if fraction else 0)
    if fraction and not unit:
        raise ValueError(f"a whole number of MiB, or a unit: {whole}.{fraction}G")
    while amount.denominator != 1 and unit != "K":
        unit = _UNITS[_UNITS.index(unit) - 1]
        amount *= 1024
    if amount.denominator != 1:
        raise ValueError("an amount of memory that is whole in K, M, G or T: 64G")
    if amount >= 2**53:
        raise ValueError("an amount of memory that a machine can have: 64G")
    return f"{int(amount)}{unit}"


def gpu_request(text: str) -> tuple[str | None, int]:
    """The type (or None) and the count of GPUs per node: "a100:4" gives ("a100", 4), "4" gives (None, 4).

    Raises:
        ValueError: not a count, not a type and a count, or no GPU at all.
    """
    bare = text.strip()
    match = _GPUS.fullmatch(bare)
    if not match or (match["type"] or "").lower() == "gpu":
        if bare.lower() in ("none", "no", "false", "null"):
            raise ValueError("a count such as 4; for a job without GPUs write null")
        if bare.lower().startswith("gpu:"):
            raise ValueError(f'a count, or a type and a count: leave out "gpu:" and write {bare[4:] or 4}')
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]*", bare, re.ASCII):
            raise ValueError(f"a count such as 4, or a type with its count such as {bare}:4")
        raise ValueError("a whole number of GPUs such as 4, or a type with its count such as a100:4")
    count = int(match["count"][:10])
    if count == 0:
        raise ValueError(
            "at least one GPU; for a job without GPUs give slurm.gpus_per_node=null and the workers with "
            "--workers-per-node (launch.workers_per_node)"
        )
    if count > _MOST_GPUS:
        raise ValueError(f"the GPUs of one node, at most {_MOST_GPUS}")
    return match["type"], count


def slurm_gpus(text: str) -> str:
    """GPUs per node as sbatch takes them: "4" or "a100:4".

    Raises:
        ValueError: as `gpu_request`.
    Source: sbatch(1), --gpus-per-node.
    """
    kind, count = gpu_request(text)
    return f"{kind}:{count}" if kind else str(count)


def signal_name(text: str) -> str:
    """The warning signal's name without SIG: "SIGUSR2", "usr2" and "USR2" all give "USR2".

    Raises:
        ValueError: a number, an unknown name, or a signal that no handler can take.
    Source: sbatch(1), --signal; signal(7).
    """
    name = text.strip().upper().removeprefix("SIG")
    if name in WARNING_SIGNALS:
        return name
    listed = ", ".join(WARNING_SIGNALS)
    bare = name.rpartition(":")[2].partition("@")[0].removeprefix("SIG")
    if bare != name and bare in WARNING_SIGNALS:
        raise ValueError(
            f"the signal's name alone, {bare}: all ranks get it, slurm.signal_lead_s=SECONDS before the end"
        )
    if name in ("KILL", "STOP"):
        raise ValueError(f"a signal that a program can handle, one of {listed} (nothing can handle {name})")
    if name.isdigit():
        raise ValueError(f"the name of a signal, one of {listed} (numbers differ between machines)")
    close = difflib.get_close_matches(name, WARNING_SIGNALS, n=1)
    raise ValueError(f"a signal, one of {listed}" + (f"; did you mean {close[0]}?" if close else ""))
