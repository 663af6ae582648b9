"""How a comparison is told where a client has no times of single requests."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.ab.served_records import ServedHeader, ServedSide
from patcher.bench.ab.engine_config import words

NO_TIMES = "no times of single requests: TTFT, TPOT, ITL, goodput and stalls are absent"


def alone(header: ServedHeader) -> list[str]:
    """What was alone on the device, and what drove it."""
    if not header.offline:
        return [f"one server alone on the device at a time, driven by {header.client}"]
    return [
        f"one engine alone on the device at a time, in the process of {header.client}, which is "
        "started for each point",
        f"{header.client} has {NO_TIMES}",
    ]


def side_said(header: ServedHeader, side: ServedSide) -> str:
    """A side with the arguments of its engine that its name does not say, such as of a search."""
    spoken = side.name.split()
    others = {
        name: value for name, value in side.arguments.items() if words({name: value}) not in spoken
    }
    more = f" with {words(others)}" if others else ""
    return f"{header.workload.engine} {side.version} {side.name}{more}"


def seen_by(header: ServedHeader) -> str:
    """The words of a title that say how it was measured."""
    return f"by {header.client}, without a server" if header.offline else "as served"


def told(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table without the columns in which no row has anything."""
    kept = [index for index in range(len(head)) if any(row[index] for row in rows)]
    return [head[index] for index in kept], [[row[index] for index in kept] for row in rows]
