"""Compare two profiles of one model: which rows changed, appeared or disappeared."""

from __future__ import annotations

import re
from typing import Literal

from patcher.bench import SCHEMA_VERSION, Record
from patcher.hotspot.names import normalise
from patcher.hotspot.profile import Hotspot, Profile

OURS = re.compile(r"\bpatcher(::|_)")
"""Names of the kernels that patcher installs."""
SAME_PCT = 1.0
"""A row that changed by less than this percentage counts as unchanged."""

Change = Literal["new", "gone", "faster", "slower", "same"]


class MovedRow(Record):
    """One kernel family or chain, before and after."""

    name: str
    kind: Literal["kernel", "chain", "memory", "idle"]
    change: Change
    before_ns: float
    """GPU time per unit of the comparison."""
    after_ns: float
    delta_ns: float
    delta_pct: float | None
    """Change relative to the row's time before; None for a new row."""
    before_launches: float
    after_launches: float


class ReplacedOp(Record):
    """One op of the library: the kernels that computed it before and after."""

    op: str
    before: tuple[str, ...]
    """Names of the kernels that computed it in the first profile."""
    after: tuple[str, ...]
    """Names of the kernels that compute it in the second profile."""
    patched: bool
    """Whether a kernel of patcher's computes it only in the second profile."""
    gone: bool
    """Whether all kernels of the first profile are gone."""
    said: str
    """`patched` and `gone` in one sentence."""


class ProfileComparison(Record):
    """The differences between two profiles of one model."""

    schema_version: int = SCHEMA_VERSION
    before: str
    """Source of the first profile."""
    after: str
    """Source of the second profile."""
    unit: Literal["decode step", "whole profile"]
    """The unit that times and launches refer to."""
    before_busy_ns: float
    """GPU busy time of the first profile, ns per unit."""
    after_busy_ns: float
    before_wall_ns: float | None
    """Wall time of the first profile, ns per unit; None if its source has no times."""
    after_wall_ns: float | None
    rows: tuple[MovedRow, ...]
    """All rows, the largest change first."""
    ops: tuple[ReplacedOp, ...]
    """The ops of the library that either profile covers."""


def compare(before: Profile, after: Profile) -> ProfileComparison:
    """Compare two profiles row by row.

    Args:
        before: the profile without patches.
        after: the profile with patches.

    Returns:
        Differences per decode step if both profiles know their steps, else over each whole profile.
    """
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
    """Rows by kind and name; only kernel names are normalised."""
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
    replaced = []
    ops = dict.fromkeys(spot.op for spot in (*old.values(), *new.values()) if spot.op)
    for op in ops:
        before = [spot.name for spot in old.values() if spot.op == op]
        after = [spot.name for spot in new.values() if spot.op == op]
        ours = [name for name in after if OURS.search(name) and name not in before]
        left = [name for name in before if name in after]
        replaced.append(
            ReplacedOp(
                op=op,
                before=tuple(before),
                after=tuple(after),
                patched=bool(ours),
                gone=not left,
                said=_sentence(op, before, ours, left),
            )
        )
    return replaced


def _sentence(op: str, before: list[str], ours: list[str], left: list[str]) -> str:
    there = (
        f"the patched kernel is there ({ours[0][:80]})" if ours else "no patched kernel is there"
    )
    if not before:
        return f"{op}: {there}; nothing did its work before under a name that the op knows"
    still = f"{left[0][:80]} still runs" if left else "what did its work before is gone"
    return f"{op}: {there}; {still}"
