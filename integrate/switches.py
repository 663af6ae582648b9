"""The environment variables for patches, which every process of an engine reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patcher.bench import UsageError
from patcher.integrate.patch import Patch
from patcher.integrate.store import Applied, Store

STARTUP = Path(__file__).absolute().parent / "startup"
"""The folder of the `sitecustomize` that installs patches when Python starts."""


def variable(name: str) -> str:
    """`PATCHER_<name>`, else `TLLM_PATCHER_<name>`, which reaches TensorRT-LLM's workers; or ""."""
    return os.environ.get(f"PATCHER_{name}") or os.environ.get(f"TLLM_PATCHER_{name}") or ""


@dataclass(frozen=True)
class Switches:
    """Which patches are enabled and how failures are handled, by the environment."""

    patches: str
    """`PATCHER_PATCHES`: `on`, ids separated by commas, or `off` (the default)."""
    strict: bool
    """`PATCHER_STRICT`: whether a failure raises instead of leaving the engine unpatched."""
    receipts: Path | None
    """`PATCHER_RECEIPTS`: the folder for this process's receipts; None for no receipts."""
    recorded: tuple[str, ...] = ()
    """`PATCHER_RECORD_POINTS`: patch points whose calls are recorded, separated by commas."""
    recordings: Path | None = None
    """`PATCHER_RECORD`: the folder for recordings; None: nothing is recorded."""
    recorded_mb: str = ""
    """`PATCHER_RECORD_MB`: most values of a point's recording, in MB; empty: the usual limit."""

    @classmethod
    def read(cls) -> Switches:
        """Read the environment of this process."""
        folder, recordings = variable("RECEIPTS"), variable("RECORD")
        points = [name.strip() for name in variable("RECORD_POINTS").split(",")]
        return cls(
            variable("PATCHES").strip() or "off",
            variable("STRICT").strip().lower() not in ("", "0", "false", "no", "off"),
            Path(os.path.expanduser(folder)) if folder else None,
            tuple(filter(None, points)),
            Path(os.path.expanduser(recordings)) if recordings else None,
            variable("RECORD_MB").strip(),
        )

    def asks_for(self, patch_id: str) -> bool:
        """Whether an applied patch with this id is enabled."""
        return "on" in self._names() or patch_id in self._ids()

    def chosen(self, engine: str, store: Store) -> list[Applied]:
        """The applied patches of an engine that are enabled.

        Raises:
            UsageError: `PATCHER_PATCHES` names an id that is not applied.
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
        """Ids in `PATCHER_PATCHES` that are not applied, sorted."""
        return sorted(self._ids() - {entry.id for entry in store.applied()})

    def _names(self) -> set[str]:
        return {name.strip() for name in self.patches.split(",")}

    def _ids(self) -> set[str]:
        return self._names() - {"", "on", "off"}


def patch_environment(patches: Sequence[Patch], home: Path, receipts: Path) -> dict[str, str]:
    """The environment variables that enable exactly these patches in a process to measure.

    They point to a separate store in `home`, and failures in the process raise.

    Args:
        patches: the patches to enable; none disables all.
        home: the folder of the store, which is written.
        receipts: the folder for the process's receipts.

    Raises:
        VerificationError: a bundle was changed or does not match this environment.
        UsageError: two patches have the same patch point.
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


def startup_python_path(python_path: str) -> str:
    """A `PYTHONPATH` that starts with the folder of our `sitecustomize`."""
    others = [place for place in python_path.split(os.pathsep) if place]
    return os.pathsep.join([str(STARTUP), *(one for one in others if one != str(STARTUP))])


def home_store() -> Store:
    """Open the store in `PATCHER_HOME`, else in `~/.patcher`.

    Raises:
        UsageError: a file is in its place, or this user has no home.
    """
    home = variable("HOME")
    store = Store(Path(home) if home else None)
    store.check()
    return store
