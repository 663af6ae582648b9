"""The job of an A/B: what to measure."""

from __future__ import annotations

from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from patcher.bench import Record, Shape, Workload
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.stats.compare import DEFAULT_PAIRS, DEFAULT_PROCESS_PAIRS, LOOKS


class ABJob(Record):
    """What to measure."""

    model_config = ConfigDict(serialize_by_alias=True)

    workload: Workload
    margin_pct: float = 0.5
    max_pairs: int = DEFAULT_PAIRS
    looks: int = LOOKS
    quality_steps: int = 32
    seed: int = 0
    lock_mhz: int | None = None
    """SM clock in MHz to lock for the A/B; None: clocks are only monitored."""
    process_pairs: int = 0
    """Number of process pairs, one process per arm; 0: both arms run in one process."""
    pairs_each: int = Field(default=DEFAULT_PAIRS // DEFAULT_PROCESS_PAIRS, ge=2)
    """Pairs of windows in each process pair."""
    alone: bool = True
    """Whether only one process is loaded at a time, as in serving, even if two fit: an idle process
    may change the speed of the other. False is a quick look: side by side, if two fit."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the engine in both arms; with process pairs."""
    tune: bool = False
    """Whether to search for the best stock configuration first; with process pairs."""
    tuned: Tuning | None = None
    """Result of an earlier search, which replaces a new one; with process pairs."""
    other_workloads: tuple[Shape, ...] = Field(
        default=(),
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Other traffic at which the patch must not lose."""
