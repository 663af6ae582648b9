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
    """Patches that were in together: what was measured, and the rule's word on each."""

    schema_version: int = SCHEMA_VERSION
    patches: tuple[str, ...] = Field(min_length=1)
    """By their ids."""
    measured: tuple[Measurement, ...]
    """For each of them, with its own receipts; all else they share, and a file holds it once."""
    reconciliation: Reconciliation | None = None
    """Of all of them."""
    decisions: tuple[Decision, ...]
    command: str = ""
    """That measured it."""
    created: str = ""
    """When: ISO 8601, UTC."""
    took_s: dict[str, float] = Field(default_factory=dict)
    """Seconds that it took, by what they went for; see `patcher.bench.ab.phases.ABPhase`."""

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
        """Of all of them: all are kept, or none."""
        return strictest(dict(zip(self.patches, self.decisions, strict=True)))
