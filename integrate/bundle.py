"""Open a patch by a bundle's path or the id of an applied patch."""

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
    """Open and verify a patch; a `.zip` file is unpacked to a temporary folder.

    Args:
        which: a bundle's folder or `.zip` file, or the id of an applied patch.

    Yields:
        The patch, valid until the end of the context.

    Raises:
        UsageError: there is no such bundle and no such applied patch.
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
