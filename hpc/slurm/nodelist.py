"""Slurm's host lists and per-node counts, read without any Slurm command.

The rules are those of `scontrol show hostnames` of Slurm 22.05, kept to the letter where somebody could depend on them:

- names are separated by commas, blanks and tabs; empty names are dropped; duplicates stay;
- `[...]` holds numbers and ranges; a number keeps the width that its first end is written with;
- several groups in one name: the last group runs fastest, then the first, then the second, and so on;
- nothing may follow the last group of a name; a range runs forward and holds at most 65,536 numbers.

Two answers of scontrol are refused here: a group that is never closed (scontrol 22.05 makes up the host "gpu]", later
ones refuse it too), and a fault in the first of three groups (scontrol complains and leaves the hosts out).
Source: scontrol(1), "show hostnames", and trials with scontrol 22.05.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from hpc.errors import EnvironmentMismatch, NodelistError

MAX_RANGE = 65_536
"""Numbers in one range, and in one group that is not the last of its name: Slurm's own limits."""
MAX_HOSTS = 1 << 24
"""Hosts of one name with several groups: beyond any cluster, and a refusal instead of a full memory."""
MAX_NODES = 1 << 22
_LARGEST = 2**64 - 1
_SHOWN = 80

_SEPARATOR = re.compile(r"[,\t ]")
_PLAIN_ITEM = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBER = re.compile(r"[ \t\n\v\f\r]*\+?([0-9]+)")
_LONG_NUMBER = re.compile(r"[0-9]{20,}\Z")
_REPEATED_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class _Fault(Exception):
    """What is wrong inside one name, and how many characters into it."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a list, in Slurm's order, zero padding and duplicates kept; an empty list gives none.

    "gpu[08-10],login1" gives gpu08, gpu09, gpu10, login1.

    Raises:
        NodelistError: a group is not closed, a range runs backward or is too long, an item is no number, or something
            follows the last group; the message has the text and the column.
    Source: scontrol(1), "show hostnames".
    """
    if "\0" in text:
        raise _refusal(text, text.index("\0"), "a NUL character")
    if "[" not in text:
        hosts = _split_plain(text)
    else:
        hosts = []
        names = _names(text)
        for index, name in enumerate(names):
            if "[" not in name:
                hosts.append(_plain_host(name))
                continue
            try:
                hosts.extend(_expand_name(name))
            except _Fault as fault:
                raise _refusal(text, _offset_of_name(text, index) + fault.offset, str(fault)) from None
    if "\n" in text:  # scontrol prints one host per line, so its readers get the lines
        hosts = [line for host in hosts for line in host.split("\n") if line]
    return hosts


def first_host(text: str) -> str:
    """The first host of a list, without expanding it; what comes after the first name is not looked at.

    Raises:
        NodelistError: the list is empty, or its first name cannot be read.
    """
    for start, name in _names_with_offsets(text):
        try:
            host = _first_of_name(name)
        except _Fault as fault:
            raise _refusal(text, start + fault.offset, str(fault)) from None
        lines = [line for line in host.split("\n") if line]  # as in expand_nodelist
        if lines:
            return lines[0]
    raise _refusal(text, 0, "it names no host")


def parse_tasks_per_node(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Slurm's per-node counts, one number per node: "2(x3),1" gives 2, 2, 2, 1. SLURM_JOB_CPUS_PER_NODE has the same form.

    Raises:
        EnvironmentMismatch: the text has another form; the message names `variable`.
    Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", SLURM_TASKS_PER_NODE.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        match = _REPEATED_COUNT.fullmatch(item)
        repeat = int(match[2]) if match and match[2] else 1
        if match is None or repeat < 1 or len(counts) + repeat > MAX_NODES:
            raise EnvironmentMismatch(
                f"{variable}={_shortened(text)} is not a list of counts such as 4(x2),1: "
                f"set it to one count per node, or unset it and set SLURM_NTASKS_PER_NODE"
            )
        counts.extend([int(match[1])] * repeat)
    return counts


def _split_plain(text: str) -> list[str]:
    """The names of a list without groups."""
    hosts = _split(text)
    if "" in hosts:
        hosts = [host for host in hosts if host]
    if len(max(hosts, key=len, default="")) >= 20:
        hosts = [_plain_host(host) for host in hosts]
    return hosts


def _split(text: str) -> list[str]:
    return (text.replace("\t", ",").replace(" ", ",") if " " in text or "\t" in text else text).split(",")


def _plain_host(name: str) -> str:
    """A name without groups: itself, but Slurm reads the digits at its end as a number of 64 bits."""
    match = _LONG_NUMBER.search(name) if len(name) >= 20 else None
    if match is None:
        return name
    return name[: match.start()] + str(min(int(match[0]), _LARGEST)).zfill(len(match[0]))


def _names(text: str) -> list[str]:
    """The names of a list; quick where brackets pair up, as they do in all lists that Slurm writes."""
    names: list[str] = []
    name, position = "", 0
    while True:
        opened = text.find("[", position)
        outside = text[position:] if opened < 0 else text[position:opened]
        pieces = _split(outside)
        closed = text.find("]", opened) if opened >= 0 else len(text)
        if "]" in outside or closed < 0 or "[" in text[opened + 1 : closed]:
            return [name for _, name in _names_with_offsets(text)]
        if len(pieces) > 1:
            names.append(name + pieces[0])
            names.extend(pieces[1:-1])
            name = ""
        name += pieces[-1]
        if opened < 0:
            names.append(name)
            return [name for name in names if name] if "" in names else names
        name += text[opened : closed + 1]
        position = closed + 1


def _names_with_offsets(text: str) -> Iterator[tuple[int, str]]:
    """Each name and where it starts. A separator between "[" and the next "]" does not end a name."""
    position = 0
    while True:
        while position < len(text) and text[position] in ",\t ":
            position += 1
        if position == len(text):
            return
        start = looked = position
        while True:
            match = _SEPARATOR.search(text, position)
            position = match.start() if match else len(text)
            opened = text.find("[", looked, position)
            closed = text.find("]", looked)
            while opened >= 0 and opened < closed < position:
                looked = closed + 1
                opened = text.find("[", looked, position)
                closed = text.find("]", looked)
            if opened < 0 or closed < opened:
                break
            position = closed
        yield start, text[start:position]


def _offset_of_name(text: str, index: int) -> int:
    return next(start for number, (start, _) in enumerate(_names_with_offsets(text)) if number == index)


def _split_groups(name: str) -> tuple[str, list[tuple[int, str, str]]]:
    """A name as its text before the first group, and the groups: offset, text inside, and the text that follows.

    A bracket in front that never closes is part of the name, as for Slurm.
    """
    opened = name.rindex("[")
    closed = name.find("]", opened)
    if closed < 0:
        raise _Fault(opened, "the group is not closed")
    if closed + 1 < len(name):
        raise _Fault(closed + 1, f"{_shortened(name[closed + 1 :])} after the last group")
    groups = [(opened + 1, name[opened + 1 : closed], "")]
    head = name[:opened]
    while (opened := head.rfind("[")) >= 0 and (closed := head.rfind("]")) > opened:
        groups.insert(0, (opened + 1, head[opened + 1 : closed], head[closed + 1 :]))
        head = head[:opened]
    return head, groups


def _first_of_name(name: str) -> str:
    if "[" not in name:
        return _plain_host(name)
    host, groups = _split_groups(name)
    for offset, inside, tail in groups:
        try:
            low, _, width = _parse_item(inside[: inside.index(",")] if "," in inside else inside)
        except _Fault as fault:
            raise _Fault(offset, str(fault)) from None
        host += str(low).zfill(width) + tail
    return host


def _expand_name(name: str) -> list[str]:
    head, groups = _split_groups(name)
    if len(groups) == 1:
        return _numbered(head, groups[0], MAX_HOSTS)
    numbers = [_numbered("", group, MAX_RANGE) for group in groups[:-1]]  # the text after each group included
    numbers.append(_numbered("", groups[-1], MAX_HOSTS))
    if prod(map(len, numbers)) > MAX_HOSTS:
        raise _Fault(0, f"more than {MAX_HOSTS} hosts in one name")
    prefixes = [""]
    for index in reversed(range(len(numbers) - 1)):  # the last but one runs slowest
        prefixes = [number + rest for rest in prefixes for number in numbers[index]]
    last = numbers[-1]
    return [beginning + number for beginning in (head + prefix for prefix in prefixes) for number in last]


def _numbered(head: str, group: tuple[int, str, str], limit: int) -> list[str]:
    """The numbers of one group, each between `head` and the text that follows the group; at most `limit`."""
    offset, inside, tail = group
    if _only_numbers(inside) and "," not in head:  # Slurm takes "a[1,2[3]" for the one host "a[1,23"
        hosts = f"{head}{inside.replace(',', f'{tail},{head}')}{tail}".split(",")
    else:
        items = inside.split(",")
        hosts = []
        for index, item in enumerate(items):
            if item.isdigit() and item.isascii() and len(item) < 19:
                hosts.append(head + item + tail)
                continue
            try:
                hosts.extend(_run(head, *_parse_item(item), tail))
            except _Fault as fault:
                raise _Fault(offset + sum(len(other) + 1 for other in items[:index]), str(fault)) from None
            if len(hosts) > limit:
                break
    if len(hosts) > limit:
        raise _Fault(offset, f"more than {limit} hosts in one group")
    return hosts


def _only_numbers(inside: str) -> bool:
    """Whether a group is numbers and commas only, none of them too long for a quick look."""
    digits = inside.replace(",", "0")
    if not (digits.isdigit() and digits.isascii()) or ",," in inside or inside[0] == "," or inside[-1] == ",":
        return False
    return len(inside) < 19 or len(max(inside.split(","), key=len)) < 19


def _run(head: str, low: int, high: int, width: int, tail: str) -> Iterator[str]:
    pattern = head.replace("%", "%%") + f"%0{width}d" + tail.replace("%", "%%")
    return map(pattern.__mod__, range(low, high + 1))


def _parse_item(item: str) -> tuple[int, int, int]:
    """Low, high and the width to pad to, of a number or a range."""
    plain = _PLAIN_ITEM.fullmatch(item)
    if plain:
        low, high, width = int(plain[1]), int(plain[2] or plain[1]), len(plain[1])
        fault = ""
    else:
        low, high, width, fault = _parse_odd_item(item)
    if low > high:
        fault = f"the range {_shortened(item)} runs backward"
    elif high - low >= MAX_RANGE:
        fault = f"the range {_shortened(item)} holds more than {MAX_RANGE} hosts"
    elif high == _LARGEST and low < high:  # scontrol dies of it
        fault = f"the range {_shortened(item)} ends beyond Slurm's numbers"
    if fault:
        raise _Fault(0, fault)
    return low, high, width


def _parse_odd_item(item: str) -> tuple[int, int, int, str]:
    """An item that Slurm never writes but reads as the C function strtoul does: "1-" is 1, "+1" and " 1" are 01.

    Low, high, width, and what is wrong with the item.
    """
    low_text, _, high_text = item.partition("-")
    low = _NUMBER.match(low_text)
    high = _NUMBER.fullmatch(high_text) if high_text else low
    if "x" in item or low is None or high is None or (not high_text and low.end() != len(low_text)):
        return 0, 0, 0, f"{_shortened(item)} is neither a number nor a range"
    width = len(low_text.encode("utf-8", "surrogateescape"))
    return min(int(low[1]), _LARGEST), min(int(high[1]), _LARGEST), width, ""


def _shortened(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _refusal(text: str, offset: int, reason: str) -> NodelistError:
    start = max(0, min(offset - _SHOWN // 2, len(text) - _SHOWN))
    shown = ("..." if start else "") + text[start : start + _SHOWN] + ("..." if start + _SHOWN < len(text) else "")
    return NodelistError(
        f"host list {shown!r} cannot be read at column {offset + 1}: {reason}; "
        f"a list such as gpu[1-4,7] was needed, or set MASTER_ADDR to rank zero's host by hand"
    )
