"""What is known of each applied patch: switched on here or not, fits or not, and what it gave."""

from __future__ import annotations

from patcher.bench import PatcherError, Record
from patcher.integrate import Applied, Store, Switches, verify


class ListedPatch(Record):
    """One row of `patcher patches`."""

    id: str
    digest: str
    engine: str
    point: str
    op: str
    on: bool
    """Whether `PATCHER_PATCHES` of this environment asks for it."""
    fits: bool
    why_not: str = ""
    evidence: str = ""
    """The judge's speedup, and against what."""


def listed(store: Store, switches: Switches) -> list[ListedPatch]:
    """Every applied patch, oldest first.

    Raises:
        VerificationError: the store's list is damaged; a damaged patch is a row that says so.
    """
    return [_row(store, entry, switches.asks_for(entry.id)) for entry in store.applied()]


def _row(store: Store, entry: Applied, on: bool) -> ListedPatch:
    fields = entry.model_dump()
    try:
        patch = store.load(entry)
    except PatcherError as error:
        return ListedPatch(**fields, on=on, fits=False, why_not=error.message)
    failure = verify(patch).failure
    found = patch.evaluation
    gain = "" if found.geomean_speedup is None else f"{found.geomean_speedup:.3f}x"
    return ListedPatch(
        **fields,
        on=on,
        fits=failure is None,
        why_not=failure.detail if failure else "",
        evidence=f"{gain} {found.baseline}" if found.baseline else gain,
    )
