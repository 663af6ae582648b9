"""The coverage ledger: each kernel row down to 95 % of busy time with its disposition.

The times of all rows add up to the busy time.
"""

from __future__ import annotations

from patcher.bench import Record
from patcher.hotspot.profile import Hotspot, Profile, Triage

COVERED_PCT = 95.0


class LedgerRow(Record):
    """One kernel row of the coverage ledger, or the sum of all smaller rows."""

    name: str
    spent_ns: int
    """Part of the busy time; of the sum over kernels if the source has no times."""
    share_pct: float
    """`spent_ns` as a percentage of all kernel rows."""
    cumulative_pct: float
    """`share_pct` added up from the first row to this one."""
    disposition: Triage
    """The triage decision."""
    reason: str
    """The reason for the decision, one sentence."""
    rank: int | None
    """Rank in `Profile.hotspots`; None for the sum of the smaller rows."""


def ledger(profile: Profile, covered_pct: float = COVERED_PCT) -> list[LedgerRow]:
    """List the kernel rows that cover most of the busy time.

    Args:
        profile: the ranked profile.
        covered_pct: the percentage of kernel time that single rows must cover.

    Returns:
        The largest rows first, then one row for the rest. Their times add up to `Profile.busy_ns`
        (to `total_kernel_ns` if the source has no times).
    """
    spots = [spot for spot in profile.hotspots if spot.kind == "kernel"]
    whole = sum(spot.spent_ns for spot in spots)
    rows: list[LedgerRow] = []
    reached = 0
    while spots and (not whole or 100 * reached < covered_pct * whole):
        spot = spots.pop(0)
        reached += spot.spent_ns
        rows.append(_row(spot, whole, reached))
    if spots:
        rest = sum(spot.spent_ns for spot in spots)
        rows.append(
            LedgerRow(
                name=f"{len(spots)} smaller rows",
                spent_ns=rest,
                share_pct=_pct(rest, whole),
                cumulative_pct=100.0,
                disposition="leave",
                reason=f"the largest of them is {spots[0].share_pct:.2g} %",
                rank=None,
            )
        )
    return rows


def _row(spot: Hotspot, whole: int, reached: int) -> LedgerRow:
    return LedgerRow(
        name=spot.name,
        spent_ns=spot.spent_ns,
        share_pct=_pct(spot.spent_ns, whole),
        cumulative_pct=_pct(reached, whole),
        disposition=spot.triage,
        reason=spot.reason,
        rank=spot.rank,
    )


def _pct(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
