"""What the figures of a check mean: which node is not fit, which is slow, and the table of it. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
LEAST_SHM = 32 * MIB
"""Less than this of /dev/shm, and data loaders and NCCL end with a bus error."""
LEAST_DISK = 256 * MIB
SKEW_S = 1.0
SLOW = {"cuda": 0.75, "cpu": 0.25}
"""A node below this share of the others' median is slow; on CPUs others may be at work."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about one node. `unfit`: a run on it will fail or crawl, so it had better be left out."""

    node: str
    what: str
    unfit: bool = True


@dataclass(kw_only=True)
class Checked:
    """What was told in a check: by node, what its task said; and by rank, what it measured."""

    nodes: tuple[str, ...]
    gpus_asked: int | None = None
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    """Nodes that told nothing (more), and where they stopped."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Nodes on which a rank failed, and how."""
    notes: list[str] = field(default_factory=list)


def judge(checked: Checked) -> list[Finding]:
    """All findings, node by node in the order of the allocation."""
    found = [finding for rule in _RULES for finding in rule(checked)]
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda finding: checked.nodes.index(finding.node))


def unfit(findings: Sequence[Finding]) -> dict[str, str]:
    """The nodes that had better be left out, each with what speaks against it first."""
    nodes: dict[str, str] = {}
    for finding in findings:
        if finding.unfit:
            nodes.setdefault(finding.node, finding.what)
    return nodes


def is_elsewhere(unfit_nodes: Mapping[str, str], checked: Checked) -> bool:
    """Whether the cause is not with the nodes: all of several are named, as when a file system is full."""
    return len(unfit_nodes) == len(checked.nodes) > 1


def _silence(checked: Checked) -> Iterator[Finding]:
    for node, where in checked.silent.items():
        yield Finding(node=node, what=where)
    for node, how in checked.failed.items():
        yield Finding(node=node, what=how)


def _gpus(checked: Checked) -> Iterator[Finding]:
    for node, told in checked.told.items():
        given, seen = told.get("gpus_given"), told.get("gpus") or []
        asked = checked.gpus_asked
        if asked and given is not None and given < asked:
            yield Finding(node=node, what=f"{given} GPUs of {asked} were given to the task")
        if asked and seen and len(seen) < asked:
            yield Finding(node=node, what=f"the driver shows {len(seen)} GPUs of {asked}")
        if seen == [] and "does not answer" in str(told.get("gpus_unknown")):
            yield Finding(node=node, what=str(told["gpus_unknown"]))
        for gpu in seen:
            for fault in gpu.get("faults", []):
                yield Finding(node=node, what=str(fault))


def _room(checked: Checked) -> Iterator[Finding]:
    for node, told in checked.told.items():
        shm, tmp, folder = told.get("shm_free"), told.get("tmp_free"), told.get("folder_free")
        if shm is None or shm < LEAST_SHM:
            yield Finding(node=node, what=f"/dev/shm has {size(shm)} free, {size(LEAST_SHM)} at least were needed")
        if tmp is None or tmp < LEAST_DISK:
            yield Finding(node=node, what=f"the folder for temporary files has {size(tmp)} free")
        if not told.get("folder_there", True):
            yield Finding(node=node, what="the shared folder of the run is not there on it")
        elif folder is not None and folder < LEAST_DISK:
            yield Finding(node=node, what=f"the shared file system has {size(folder)} free", unfit=False)
        away = [
            facts
            for facts in (told.get("reach") or {}).values()
            if not str(facts.get("address", "127.")).startswith("127.")
        ]
        if told.get("loopback") and away:
            yield Finding(
                node=node, what=f"its own name {told.get('host')} resolves to {told.get('address')}", unfit=False
            )
        if told.get("address") == "":
            yield Finding(node=node, what=f"its own name {told.get('host')} does not resolve", unfit=False)


def _network(checked: Checked) -> Iterator[Finding]:
    yield from _blame(checked, lambda told: told.get("reach") or {}, "reach")


def _files(checked: Checked) -> Iterator[Finding]:
    for node, told in checked.told.items():
        if told.get("write_error"):
            yield Finding(node=node, what=f"it cannot write {told['write_error']}")
    yield from _blame(checked, lambda told: told.get("seen") or {}, "see the file of")


def _blame(checked: Checked, view: Callable[[Mapping[str, Any]], Mapping[str, Any]], verb: str) -> Iterator[Finding]:
    """Who is at fault when some cannot reach others: the one that most others cannot reach, or that cannot reach most."""
    broken = {
        (node, peer): str(facts["error"])
        for node, told in checked.told.items()
        for peer, facts in view(told).items()
        if peer in checked.told and "error" in facts
    }
    tried = [(node, peer) for node, told in checked.told.items() for peer in view(told) if peer in checked.told]
    calls, called = Counter(node for node, _ in tried), Counter(peer for _, peer in tried)
    failed, missed = Counter(node for node, _ in broken), Counter(peer for _, peer in broken)
    bad = {node for node in checked.told if 2 * failed[node] > calls[node] or 2 * missed[node] > called[node]}
    for (node, peer), error in broken.items():
        if peer in bad and node not in bad:
            yield Finding(node=peer, what=f"{node} cannot {verb} it: {error}")
        else:
            yield Finding(node=node, what=f"it cannot {verb} {peer}: {error}")


def _clocks(checked: Checked) -> Iterator[Finding]:
    ahead: dict[str, list[float]] = {}
    for node, told in checked.told.items():
        for peer, facts in (told.get("reach") or {}).items():
            if "ahead_s" in facts:
                ahead.setdefault(peer, []).append(float(facts["ahead_s"]))
                ahead.setdefault(node, []).append(-float(facts["ahead_s"]))
    for node, offsets in ahead.items():
        skew = statistics.median(offsets)
        if abs(skew) > SKEW_S:
            words = "ahead of" if skew > 0 else "behind"
            yield Finding(node=node, what=f"its clock is {abs(skew):.1f} s {words} the others'", unfit=False)


def _ranks(checked: Checked) -> Iterator[Finding]:
    for rank in checked.ranks:
        if not rank.get("same", True):
            yield Finding(node=_node(rank, checked), what=f"GPU {rank['local_rank']} gives other products each time")
    for name, what in (("tflop_s", "multiplies"), ("copy_gb_s", "copies"), ("node_gb_s", "adds up among its ranks")):
        figures = by_node(checked, name)
        device = str(checked.ranks[0].get("device", "cpu")) if checked.ranks else "cpu"
        for node, figure in figures.items():
            others = [other for peer, other in figures.items() if peer != node]
            if others and figure < SLOW.get(device, 0.5) * statistics.median(others):
                usual = statistics.median(others)
                yield Finding(
                    node=node, what=f"slow: it {what} at {figure:.3g}, the others at {usual:.3g} {_UNITS[name]}"
                )


_RULES = (_silence, _gpus, _room, _network, _files, _clocks, _ranks)
_UNITS = {"tflop_s": "TFLOP/s", "copy_gb_s": "GB/s", "node_gb_s": "GB/s", "all_gb_s": "GB/s"}


def by_node(checked: Checked, name: str) -> dict[str, float]:
    """The slowest rank's figure of each node that has one."""
    figures: dict[str, float] = {}
    for rank in checked.ranks:
        value = rank.get(name)
        if isinstance(value, (int, float)):
            node = _node(rank, checked)
            figures[node] = min(figures.get(node, float(value)), float(value))
    return figures


def _node(rank: Mapping[str, Any], checked: Checked) -> str:
    return named(str(rank.get("host")), checked.nodes)


def named(host: str, nodes: Sequence[str]) -> str:
    """The node that a host calls itself, by its longer or shorter name; the first node where that is nobody's."""
    if host in nodes:
        return host
    short = host.split(".")[0]
    return next((node for node in nodes if node.split(".")[0] == short), nodes[0])


# ---- the table -------------------------------------------------------------------------------------------------------

COLUMNS = (
    "node", "GPUs", "shm free", "tmp free", "reached", "ms", "clock", "write MiB/s", "seen", "TFLOP/s", "copy GB/s", "node GB/s",
)  # fmt: skip


def rows(checked: Checked) -> list[tuple[str, ...]]:
    """One row for each node, under COLUMNS; "-" for what was not measured."""
    figures = [by_node(checked, name) for name in ("tflop_s", "copy_gb_s", "node_gb_s")]
    return [_row(node, checked, figures) for node in checked.nodes]


def _row(node: str, checked: Checked, figures: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    told = checked.told.get(node, {})
    reach, seen = told.get("reach"), told.get("seen")
    good = [facts for facts in (reach or {}).values() if "error" not in facts]
    skews = [float(facts["ahead_s"]) for facts in good]
    return (
        node,
        _gpu_cell(told),
        size(told.get("shm_free")),
        size(told.get("tmp_free")),
        "-" if reach is None else f"{len(good)} of {len(reach)}",
        f"{max(float(facts['ms']) for facts in good):.1f}" if good else "-",
        f"{-statistics.median(skews):+.2f} s" if skews else "-",
        f"{told['mib_per_s']:.0f}" if "mib_per_s" in told else "-",
        "-" if seen is None else f"{len([1 for facts in seen.values() if 'error' not in facts])} of {len(seen)}",
        *(f"{figure[node]:.3g}" if node in figure else "-" for figure in figures),
    )


def _gpu_cell(told: Mapping[str, Any]) -> str:
    seen, given = told.get("gpus") or [], told.get("gpus_given")
    if seen:
        return f"{len(seen)} {seen[0].get('name', '')}".strip()
    return "-" if given is None else f"{given} given"


def size(value: int | None) -> str:
    """An amount of room: "31.2 GiB", "12 MiB", "none"."""
    if value is None:
        return "none"
    return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"
