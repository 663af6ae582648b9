"""What is to be measured end to end, and what was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from patcher.ab.decision import Decision
from patcher.ab.other_workloads import OtherWorkloads
from patcher.bench import SCHEMA_VERSION, Quality, Record, Shape, Throughput, Workload
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.stats.compare import DEFAULT_PAIRS, DEFAULT_PROCESS_PAIRS, LOOKS
from patcher.bench.stats.comparison import Verdict
from patcher.integrate import Receipt
from patcher.reconciling.reconcile import Reconciliation

STRICTEST: tuple[Verdict, ...] = ("reject", "inconclusive", "accept")
Report = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


class ABJob(Record):
    """What to measure."""

    workload: Workload
    margin_pct: float = 0.5
    max_pairs: int = DEFAULT_PAIRS
    looks: int = LOOKS
    quality_steps: int = 32
    seed: int = 0
    lock_mhz: int | None = None
    """SM clock to lock for the A/B; None: it is only watched."""
    process_pairs: int = 0
    """Of processes, one for each arm; 0: the patch comes and goes in one process."""
    pairs_each: int = Field(default=DEFAULT_PAIRS // DEFAULT_PROCESS_PAIRS, ge=2)
    """Pairs of windows in each process pair."""
    alone: bool = False
    """Whether each process has the device to itself, as a served engine has, though two fit: an
    idle one beside it may change how fast it is."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Of the engine in both arms, beside what the workload asks for; with process pairs."""
    tune: bool = False
    """Whether the best stock configuration is looked for first; with process pairs."""
    tuned: Tuning | None = None
    """What such a search found before, in place of another; with process pairs."""
    elsewhere: tuple[Shape, ...] = ()
    """Other traffic at which nothing may be lost."""


class Measurement(Record):
    """What was measured."""

    schema_version: int = SCHEMA_VERSION
    throughput: Throughput
    quality: Quality
    receipt: Receipt
    """Calls in the throughput's patched windows."""
    quality_receipt: Receipt
    """Calls in the quality run: the same model must have been compared."""
    reverted_identical: bool
    """Greedy output after the revert is bit-identical to before the patch."""
    elsewhere: OtherWorkloads | None = None
    """At other traffic, where that was measured."""


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
    """Seconds that it took, by what they went for; see `patcher.ab.timeline`."""

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
        """The strictest: all are kept, or none. What is not said of every patch names its own."""
        strictest = min(self.decisions, key=lambda one: STRICTEST.index(one.verdict))
        if len(self.patches) == 1:
            return strictest
        shared = set.intersection(*(set(one.reasons) for one in self.decisions))
        reasons = [reason for reason in strictest.reasons if reason in shared]
        for patch, one in zip(self.patches, self.decisions, strict=True):
            if one.verdict == strictest.verdict:
                reasons += [f"{reason} ({patch})" for reason in one.reasons if reason not in shared]
        return strictest.model_copy(update={"reasons": tuple(reasons)})
