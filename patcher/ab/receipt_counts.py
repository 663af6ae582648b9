"""Sums and differences of receipts, to count the calls of a patch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from patcher.integrate import Receipt

COUNTS = ("calls", "replayed", "fallbacks")
"""Of a receipt."""


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """The sum of one patch's receipts in several processes."""
    last = receipts[-1]
    sums = {
        field: dict(sum((Counter(getattr(one, field)) for one in receipts), Counter[str]()))
        for field in COUNTS
    }
    return last.model_copy(update=sums)


def difference(later: Receipt, earlier: Receipt) -> Receipt:
    """The calls between two receipts."""
    counts = {
        field: dict(Counter(getattr(later, field)) - Counter(getattr(earlier, field)))
        for field in COUNTS
    }
    return later.model_copy(update=counts)


def called_between(earlier: Sequence[Receipt], later: Sequence[Receipt]) -> dict[str, Receipt]:
    """Receipts by patch id."""
    known = {one.patch_id: one for one in earlier}
    return {
        one.patch_id: difference(one, known[one.patch_id]) if one.patch_id in known else one
        for one in later
    }


def calls_between(earlier: Sequence[Receipt], later: Sequence[Receipt]) -> tuple[Receipt, ...]:
    """Calls by patch, summed over the processes of a server."""
    before, after = _summed(earlier), _summed(later)
    return tuple(called_between(before, after).values())


def _summed(receipts: Sequence[Receipt]) -> list[Receipt]:
    names = dict.fromkeys(one.patch_id for one in receipts)
    return [merged([one for one in receipts if one.patch_id == name]) for name in names]
