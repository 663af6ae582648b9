"""Two profiles of one model: which rows moved, which kernels came and which went."""

from __future__ import annotations

import re
from typing import Literal

from patcher.bench import SCHEMA_VERSION, Record
from patcher.hotspot.names import normalise
from patcher.hotspot.profile import Hotspot, Profile

OURS = re.compile(r"\bpatcher(::|_)")
"""How kernels that patcher puts in are named."""
SAME_PCT = 1.0
"""A row that changed by less than this did not move."""

Change = Literal["new", "gone", "faster", "slower", "same"]


class MovedRow(Record):
    """One kernel family or chain, before and after."""

    name: str
    kind: Literal["kernel", "chain", "memory", "idle"]
    change: Change
    before_ns: float
    """Time on the GPU in the unit of the comparison."""
    after_ns: float
    delta_ns: float
    delta_pct: float | None
    """Of the row itself; None where it was not there before."""
    before_launches: float
    after_launches: float


class ReplacedOp(Record):
    """One op of the library: what did its work before, and what does it after."""

    op: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    patched: bool
    """A kernel of patcher's does it after, and did not before."""
    gone: bool
    """None of the kernels that did it before is left."""
    said: str
    """Both, in a sentence."""


class ProfileComparison(Record):
    schema_version: int = SCHEMA_VERSION
    before: str
    after: str
    unit: Literal["decode step", "whole profile"]
    """What times and launches are counted over."""
    before_busy_ns: float
    after_busy_ns: float
    before_wall_ns: float | None
    after_wall_ns: float | None
    rows: tuple[MovedRow, ...]
    """The largest change first."""
    ops: tuple[ReplacedOp, ...]


def compare(before: Profile, after: Profile) -> ProfileComparison:
    """Row by row; by decode step where both profiles know their steps."""
    by_step = bool(before.steps and after.steps)
    first, second = (
        profile.steps if by_step and profile.steps else 1 for profile in (before, after)
    )
    old, new = _rows(before), _rows(after)
    rows = [
        _moved(old.get(key), new.get(key), first, second) for key in dict.fromkeys((*old, *new))
    ]
    return ProfileComparison(
        before=before.source,
        after=after.source,
        unit="decode step" if by_step else "whole profile",
        before_busy_ns=_busy(before) / first,
        after_busy_ns=_busy(after) / second,
        before_wall_ns=before.wall_ns / first if before.wall_ns else None,
        after_wall_ns=after.wall_ns / second if after.wall_ns else None,
        rows=tuple(sorted(rows, key=lambda row: (-abs(row.delta_ns), row.name))),
        ops=tuple(_replaced(old, new)),
    )


def _rows(profile: Profile) -> dict[tuple[str, str], Hotspot]:
    """Kernels by one spelling; what else a row is called is no kernel's name."""
    return {
        (spot.kind, normalise(spot.name) if spot.kind == "kernel" else spot.name): spot
        for spot in profile.hotspots
    }


def _busy(profile: Profile) -> int:
    return profile.busy_ns if profile.busy_ns is not None else profile.total_kernel_ns


def _moved(old: Hotspot | None, new: Hotspot | None, first: int, second: int) -> MovedRow:
    shown = new or old
    assert shown is not None
    before = old.spent_ns / first if old else 0.0
    after = new.spent_ns / second if new else 0.0
    share = 100 * (after - before) / before if before else None
    return MovedRow(
        name=shown.name,
        kind=shown.kind,
        change=_change(old, new, share),
        before_ns=before,
        after_ns=after,
        delta_ns=after - before,
        delta_pct=share,
        before_launches=old.instances / first if old else 0.0,
        after_launches=new.instances / second if new else 0.0,
    )


def _change(old: Hotspot | None, new: Hotspot | None, share: float | None) -> Change:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    if share is None or abs(share) < SAME_PCT:
        return "same"
    return "faster" if share < 0 else "slower"


def _replaced(
    old: dict[tuple[str, str], Hotspot], new: dict[tuple[str, str], Hotspot]
) -> list[ReplacedOp]:
    found = []
    ops = dict.fromkeys(spot.op for spot in (*old.values(), *new.values()) if spot.op)
    for op in ops:
        before = [spot.name for spot in old.values() if spot.op == op]
        after = [spot.name for spot in new.values() if spot.op == op]
        ours = [name for name in after if OURS.search(name) and name not in before]
        left = [name for name in before if name in after]
        found.append(
            ReplacedOp(
                op=op,
                before=tuple(before),
                after=tuple(after),
                patched=bool(ours),
                gone=not left,
                said=_said(op, before, ours, left),
            )
        )
    return found


def _said(op: str, before: list[str], ours: list[str], left: list[str]) -> str:
    there = (
        f"the patched kernel is there ({ours[0][:80]})" if ours else "no patched kernel is there"
    )
    if not before:
        return f"{op}: {there}; nothing did its work before under a name that the op knows"
    still = f"{left[0][:80]} still runs" if left else "what did its work before is gone"
    return f"{op}: {there}; {still}"
