"""The measurement of a patch in an A/B."""

from __future__ import annotations

from pydantic import AliasChoices, ConfigDict, Field

from patcher.ab.other_workloads import OtherWorkloads
from patcher.bench import SCHEMA_VERSION, Quality, Record, Throughput
from patcher.integrate import Receipt


class Measurement(Record):
    """The measurement of one patch."""

    model_config = ConfigDict(serialize_by_alias=True)

    schema_version: int = SCHEMA_VERSION
    throughput: Throughput
    quality: Quality
    receipt: Receipt
    """Calls in the throughput's patched windows."""
    quality_receipt: Receipt
    """Calls in the quality run, which must have compared the patched model."""
    reverted_identical: bool
    """Greedy output after the revert is bit-identical to before the patch."""
    other_workloads: OtherWorkloads | None = Field(
        default=None,
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Measurements at other traffic, if any."""
