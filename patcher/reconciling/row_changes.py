"""What a profile before and one after say beside the patched kernels: which rows moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from patcher.hotspot import Profile, ProfileComparison, compare

_LEAST_PCT = 0.05
"""Of the step: rows that moved by less are added up in one line."""
_OVERLAP_PCT = 2.0
_STEP_APART_PCT = 20.0
"""A profiler costs time; with more than this it is another step, and its rows are not counted."""


@dataclass(frozen=True)
class RowChanges:
    """The fields of a `GainRow`."""

    name: str
    launches: float | None
    saved_us: float
    counted: bool
    note: str


def moved_rows(
    before: Profile,
    after: Profile,
    ops: Sequence[str],
    step_us: float,
    owns: Callable[[str], bool] = lambda name: False,
) -> tuple[list[RowChanges], list[str]]:
    """Rows that moved otherwise, the largest first, and what the patched ops' own rows show.

    Chains are left out, since their time is in their kernels' rows. What is there in one profile
    only, and how long the GPU idled, is shown and not counted: mostly it is what a patched kernel
    took the place of under a name that nobody foresaw, or fewer launches, and its micro-benchmark
    has these savings already.

    Args:
        owns: whether a kernel of that name is a patch's, or did its work before; as those are that
            the profiles know for one of the ops by name.
    """
    found = compare(before, after)
    apart = [words for one in (before, after) for words in _apart(one, step_us)]
    if found.unit != "decode step":
        return [], ["a profile does not know its decode steps: what moved in it is not counted"]
    own = _names(found, ops)
    rows: list[RowChanges] = []
    small = shown = 0.0
    few, theirs = 0, 0
    for row in found.rows:
        saved = -row.delta_ns / 1e3
        if row.kind == "chain" or not saved:
            continue
        if row.name in own or owns(row.name):
            shown += saved
            theirs += 1
        elif row.change == "same" or abs(saved) < _LEAST_PCT * step_us / 100:
            small += saved
            few += 1
        else:
            launches = row.after_launches or row.before_launches
            told = row.change in ("faster", "slower") and row.kind == "kernel"
            rows.append(RowChanges(row.name, launches, saved, told and not apart, row.change))
    if theirs:
        said = "what the profiles show for it, to compare with its micro gain"
        rows.append(RowChanges(", ".join(ops), None, shown, False, said))
    if few:
        rows.append(RowChanges(f"{few} rows that hardly moved", None, small, False, "within noise"))
    caveat = "a row of a profile is one recording before and one after: it has no interval"
    return rows, [caveat, *apart, *_in_all(before, after)]


def _in_all(before: Profile, after: Profile) -> list[str]:
    """What the step gains by the profiles alone: all changes, and how they overlap."""
    if not (before.busy_ns and before.steps and after.busy_ns and after.steps):
        return []
    was = before.busy_ns / before.steps / 1e3
    now = after.busy_ns / after.steps / 1e3
    return [
        f"by the profiles alone a step keeps the GPU busy for {was:,.0f} us before and "
        f"{now:,.0f} us after, which would be {100 * (was / now - 1):+.2f} %"
    ]


def _names(found: ProfileComparison, ops: Sequence[str]) -> set[str]:
    return {name for one in found.ops if one.op in ops for name in (*one.before, *one.after)}


def overlap_caveat(profile: Profile | None) -> list[str]:
    """That kernels run beside each other, where they do."""
    if profile is None or not profile.busy_ns:
        return []
    share = 100 * (profile.total_kernel_ns / profile.busy_ns - 1)
    if share < _OVERLAP_PCT:
        return []
    return [
        f"kernels overlap ({share:.0f} % more kernel time than busy time: several streams or "
        "dependent launches), so a step need not get shorter by what a kernel saves alone"
    ]


def _apart(profile: Profile, step_us: float) -> list[str]:
    """That the profiled step is another than the measured one, where it is."""
    if not profile.steps or not profile.wall_ns:
        return []
    profiled = profile.wall_ns / profile.steps / 1e3
    if abs(profiled / step_us - 1) * 100 <= _STEP_APART_PCT:
        return []
    return [
        f"a step takes {profiled:,.0f} us in {profile.source} and {step_us:,.0f} us in the A/B, so "
        "what moved in the profile is not to scale and not in the sum"
    ]
