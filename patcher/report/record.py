"""The contents of a report: everything about one run, any part of which may be absent."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import Field, field_validator

from patcher.ab.best_set import BestSet
from patcher.ab.decision import Decision
from patcher.ab.other_workloads import OtherWorkloads
from patcher.attempts import Attempt, Stopped
from patcher.bench import (
    SCHEMA_VERSION,
    Environment,
    Evaluation,
    Quality,
    Record,
    Throughput,
    Workload,
)
from patcher.hotspot import Hotspot, KernelStat, Profile
from patcher.hotspot.profile import Triage
from patcher.models.ceilings import CostLedger
from patcher.reconciling.reconcile import Reconciliation
from patcher.verdicts.human_verdict import HumanVerdict


class ReceiptRow(Record):
    """Calls of the patched kernel by shape, and calls of the original by reason."""

    calls: dict[str, int] = Field(default_factory=dict)
    fallbacks: dict[str, int] = Field(default_factory=dict)


class PatchReceipts(Record):
    """The calls of one of several patches."""

    patch_id: str
    op: str
    ab: ReceiptRow
    quality: ReceiptRow


class Report(Record):
    """One run; parts that it did not reach are None or empty, and the report says so."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created: str
    """ISO 8601, UTC."""
    title: str
    commands: tuple[str, ...] = ()
    """The exact commands behind the figures, in order."""
    model: str | None = None
    workload: Workload | None = None
    stopped: str | None = None
    """Why the run ended before its last stage."""
    recorded_conversation: bool = False
    """Whether the model's replies come from a recording."""
    recorded_note: str | None = None
    """Where the recording comes from."""
    profile: Profile | None = None
    """Profile of the unpatched engine."""
    profile_after: Profile | None = None
    """Profile of the patched engine."""
    attempts: tuple[Attempt, ...] = ()
    ledger: CostLedger | None = None
    """What the run's questions cost."""
    loop_ended: Stopped | None = None
    """Why the loop ended."""
    best: Evaluation | None = None
    candidate_source: str | None = None
    candidate_language: str | None = None
    patch_id: str | None = None
    throughput: Throughput | None = None
    quality: Quality | None = None
    receipt: ReceiptRow | None = None
    """Of the A/B."""
    quality_receipt: ReceiptRow | None = None
    """Receipt of the quality run, which must cover the shapes of the A/B."""
    receipts: tuple[PatchReceipts, ...] = ()
    """The calls of each of several patches; the two receipts above are their sums."""
    reconciliation: Reconciliation | None = None
    """Whether the kernel's own gain explains the measured one."""
    elsewhere: OtherWorkloads | None = None
    """Results at other traffic, and memory."""
    best_set: BestSet | None = None
    """Several patches: each alone and together."""
    decision: Decision | None = None
    """The rule's."""
    words: tuple[HumanVerdict, ...] = ()
    """Human verdicts, oldest first; they do not change the rule's decision."""
    reverted_identical: bool | None = None
    """Whether greedy output after the revert is bit-identical to before; None if not tested."""
    environment: Environment | None = None

    @field_validator("profile", "profile_after", mode="before")
    @classmethod
    def _older(cls, value: Any) -> Any:
        """Read reports of earlier versions, whose profiles have fewer or other fields."""
        return _profile_of_old(value) if isinstance(value, dict) else value


_KINDS: tuple[Any, ...] = get_args(Hotspot.model_fields["kind"].annotation)


def _profile_of_old(profile: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a hotspot lacks from the kernel of its name."""
    listed = [_known(kernel, KernelStat) for kernel in profile.get("kernels") or ()]
    kernels = {kernel.get("name"): kernel for kernel in listed}
    hotspots = []
    spots: list[dict[str, Any]] = profile.get("hotspots") or []
    for rank, spot in enumerate(spots, 1):
        said = {name: each for name, each in spot.items() if each is not None}
        least = {"rank": rank, "op": None, "ceiling_pct": 0.0, "instances": 0, "mean_ns": 0.0}
        merged: dict[str, Any] = {
            **least,
            **_known(kernels.get(spot.get("name"), {}), Hotspot),
            **said,
        }
        if merged.get("kind") not in _KINDS:
            merged.pop("kind", None)
        if merged.get("triage") not in get_args(Triage):
            merged.pop("triage", None)
        hotspots.append(_known(merged, Hotspot))
    return {**_known(profile, Profile), "kernels": listed, "hotspots": hotspots}


def _known(given: dict[str, Any], kind: type[Record]) -> dict[str, Any]:
    names = {*kind.model_fields, "speed_of_light_pct"}
    return {name: value for name, value in given.items() if name in names}
