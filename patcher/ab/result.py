"""Patches that were measured together, with the verdict on each."""

from __future__ import annotations

from typing import Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from patcher.ab.decision import Decision, strictest
from patcher.ab.measurement import Measurement
from patcher.bench import SCHEMA_VERSION, Record
from patcher.reconciling.reconcile import Reconciliation


class ABResult(Record):
    """Patches that were installed together: their measurements, and the decision on each."""

    schema_version: int = SCHEMA_VERSION
    patches: tuple[str, ...] = Field(min_length=1)
    """By their ids."""
    measured: tuple[Measurement, ...]
    """The measurement of each patch; in the file, fields that they share are written once."""
    reconciliation: Reconciliation | None = None
    """The reconciliation of all patches together."""
    decisions: tuple[Decision, ...]
    command: str = ""
    """That measured it."""
    created: str = ""
    """When: ISO 8601, UTC."""
    took_s: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase; see `patcher.bench.ab.phases.ABPhase`."""

    @model_serializer(mode="wrap")
    def _shared_once(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        first, *others = data["measured"]
        for one in others:
            for name in [name for name, value in one.items() if value == first[name]]:
                del one[name]
        return data

    @model_validator(mode="before")
    @classmethod
    def _shared_everywhere(cls, data: Any) -> Any:
        match data:
            case {"measured": [{**first}, *others]} if all(isinstance(one, dict) for one in others):
                return data | {"measured": [first, *(first | one for one in others)]}
        return data

    @property
    def decision(self) -> Decision:
        """The decision on all patches together."""
        return strictest(dict(zip(self.patches, self.decisions, strict=True)))
