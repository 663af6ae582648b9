"""A patch by the name that a person gives: a bundle on disk, or the id of an applied one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patcher.bench import UsageError
from patcher.integrate.archive import unpacked
from patcher.integrate.patch import Patch
from patcher.integrate.switches import home_store


@contextmanager
def open_bundle(which: str | Path) -> Iterator[Patch]:
    """A patch, verified; what a `.zip` file is unpacked to lives as long as this.

    Args:
        which: a bundle's folder or `.zip` file, or the id of an applied patch.

    Raises:
        UsageError: there is neither.
        VerificationError: the bundle is damaged.
    """
    store = home_store()
    entry = next((known for known in store.applied() if known.id == str(which)), None)
    if entry is not None:
        yield store.load(entry)
        return
    if not Path(which).exists():
        raise UsageError(
            f"{which} is neither a bundle nor an applied patch",
            "see `patcher patches`, or give a path",
        )
    with unpacked(Path(which)) as folder:
        yield Patch.load(folder)
