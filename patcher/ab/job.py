"""What an A/B is to measure."""

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
    other_workloads: tuple[Shape, ...] = Field(
        default=(),
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Other traffic at which nothing may be lost."""
