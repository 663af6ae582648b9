"""The patch bundle that a run made."""

from __future__ import annotations

from patcher.bench import Record


class RunPatch(Record):
    """A patch bundle in the run's folder."""

    folder: str
    id: str
    digest: str
