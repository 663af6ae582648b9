"""The coverage ledger: every kernel row down to 95 % of busy time has a disposition, and all of
them add up."""

from __future__ import annotations

from patcher.bench import Record
from patcher.hotspot.profile import Hotspot, Profile, Triage

COVERED_PCT = 95.0


class LedgerRow(Record):
    name: str
    spent_ns: int
    """Of the busy time; where the source has no times, of the sum over kernels."""
    share_pct: float
    cumulative_pct: float
    disposition: Triage
    reason: str
    rank: int | None
    """In the ranking; None for what is summed up."""


def ledger(profile: Profile, covered_pct: float = COVERED_PCT) -> list[LedgerRow]:
    """Kernel rows, the largest first, until they cover so much; then the rest as one row.

    The times add up to `Profile.busy_ns` (to `total_kernel_ns` where the source has no times).
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
