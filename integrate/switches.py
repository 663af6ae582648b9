"""What the environment says of patches: the switches that every process of an engine reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import UsageError
from patcher.integrate.patch import Patch
from patcher.integrate.store import Applied, Store

STARTUP = Path(__file__).absolute().parent / "startup"
"""Where the `sitecustomize` lies that puts patches in when Python starts."""


def variable(name: str) -> str:
    """`PATCHER_<name>`, or `TLLM_PATCHER_<name>`: only such names reach TensorRT-LLM's workers."""
    return os.environ.get(f"PATCHER_{name}") or os.environ.get(f"TLLM_PATCHER_{name}") or ""


@dataclass(frozen=True)
class Switches:
    """What the environment says."""

    patches: str
    """`PATCHER_PATCHES`: `on`, ids separated by commas, or `off`, which is the default."""
    strict: bool
    """`PATCHER_STRICT`: what fails raises, instead of leaving the engine as it is."""
    receipts: Path | None
    """`PATCHER_RECEIPTS`: the folder where this process says what ran."""

    @classmethod
    def read(cls) -> Switches:
        folder = variable("RECEIPTS")
        return cls(
            variable("PATCHES").strip() or "off",
            variable("STRICT") not in ("", "0"),
            Path(folder) if folder else None,
        )

    def asks_for(self, patch_id: str) -> bool:
        """Whether an applied patch of that id is to be put in."""
        return self.patches == "on" or patch_id in self._ids()

    def chosen(self, engine: str, store: Store) -> list[Applied]:
        """The applied patches of an engine that the environment asks for.

        Raises:
            UsageError: one that is asked for by its id is not applied.
            VerificationError: the store is damaged.
        """
        if self.patches == "off":
            return []
        entries = store.applied()
        if unknown := self.unknown(store):
            raise UsageError(
                f"PATCHER_PATCHES names {unknown[0]}, which is not applied",
                "see `patcher patches`, or set PATCHER_PATCHES=on",
            )
        return [one for one in entries if one.engine == engine and self.asks_for(one.id)]

    def unknown(self, store: Store) -> list[str]:
        """Ids that are asked for and not applied."""
        return sorted(self._ids() - {entry.id for entry in store.applied()})

    def _ids(self) -> set[str]:
        names = {name.strip() for name in self.patches.split(",")}
        return names - {"", "on", "off"}


def switching_on(patches: Sequence[Patch], home: Path, receipts: Path) -> dict[str, str]:
    """What the environment of a process that is measured says, so that just these patches are in,
    from a store of their own in `home`; what fails in it raises.

    Raises:
        VerificationError: a bundle was changed, or does not fit here.
        UsageError: two patches for one patch point.
    """
    store = Store(home)
    for patch in patches:
        store.apply(patch.folder)
    return {
        "PATCHER_PATCHES": "on" if patches else "off",
        "PATCHER_HOME": str(home),
        "PATCHER_RECEIPTS": str(receipts),
        "PATCHER_STRICT": "1",
    }


def starting_up(python_path: str) -> str:
    """A `PYTHONPATH` with our `sitecustomize` before all others."""
    others = [place for place in python_path.split(os.pathsep) if place]
    return os.pathsep.join([str(STARTUP), *(one for one in others if one != str(STARTUP))])


def home_store() -> Store:
    """The store that `PATCHER_HOME` names, else the user's own."""
    home = variable("HOME")
    return Store(Path(home) if home else None)
