"""Who waited for whom, from the record of a run alone. Pure; any event may be missing or damaged."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

HOSTS_SHOWN = 4


def pace_lines(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Ranks that were named as slow, and how a step's work was spread over ranks and hosts in the newest start."""
    named: dict[tuple[Any, Any, Any], str] = {}
    newest: list[str] = []
    for event in events:
        kind, key = event.get("event"), (event.get("attempt"), event.get("restart"), event.get("rank"))
        if kind == "slow":
            named[key] = _named(event)
        elif kind == "slow_no_more" and key in named:
            named[key] += f", until {_clock(event)}"
        elif kind == "paces":
            newest = _spread(event)
    return [*named.values(), *newest]


def _named(event: Mapping[str, Any]) -> str:
    return (
        f"rank {event.get('rank')} on {event.get('host')} was slow from {_clock(event)} on: {_seconds(event, 'own_s')} of "
        f"work of its own in a step, the others {_seconds(event, 'others_s')}; a step took {_seconds(event, 'step_s')}"
    )


def _spread(event: Mapping[str, Any]) -> list[str]:
    slowest, hosts = (_pairs(event.get(name), length) for name, length in (("slowest", 3), ("hosts", 2)))
    if not slowest:
        return []
    rank, host, own_s = slowest[0]
    line = (
        f"work of its own in a step: median {_seconds(event, 'median_s')} over {event.get('ranks')} ranks, most "
        f"{own_s:.3g} s in rank {rank} on {host}; a step took {_seconds(event, 'step_s')}"
    )
    if len(hosts) > 1:
        shown = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in hosts[:HOSTS_SHOWN])
        line += f"; by host: {shown}" + (" ..." if len(hosts) > HOSTS_SHOWN else "")
    return [line]


def _pairs(value: Any, length: int) -> list[list[Any]]:
    items = value if isinstance(value, list) else []
    return [
        item for item in items if isinstance(item, list) and len(item) == length and isinstance(item[-1], int | float)
    ]


def _seconds(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return f"{value:.3g} s" if isinstance(value, int | float) else "?"


def _clock(event: Mapping[str, Any]) -> str:
    moment = event.get("time")
    known = isinstance(moment, int | float) and 0 <= moment < 1e11
    return time.strftime("%H:%M:%S", time.localtime(moment)) if known else "?"
