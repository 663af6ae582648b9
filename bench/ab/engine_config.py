"""Stock configurations that were tried, and the best of them: the baseline of both arms."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from patcher.bench.machine.environment import Environment
from patcher.bench.records import Record
from patcher.bench.workload import Workload

LEAST_GAIN_PCT = 0.5
"""Trials come one after another: what is smaller may be drift."""


class OtherWorkloadRate(Record):
    """The same process at other traffic: what is best there may be another configuration."""

    batch: int
    context: int
    """Prompt tokens."""
    tokens_per_s: float
    """Median over short windows."""
    spread_pct: float
    """Largest window over smallest, less one."""


class ConfigTrial(Record):
    """One way to start the engine, and how fast it was."""

    model_config = ConfigDict(serialize_by_alias=True)

    arguments: dict[str, JsonValue]
    """Of the engine, beside those that the workload asks for; empty: stock."""
    tokens_per_s: float | None
    """Median over short windows; None where it did not run."""
    spread_pct: float | None = None
    """Largest window over smallest, less one."""
    other_workloads: tuple[OtherWorkloadRate, ...] = Field(
        default=(),
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Where that was asked for; nothing is chosen by it."""
    failure: str = ""

    def beats(self, other: ConfigTrial) -> bool:
        """By more than the windows of either differ."""
        if self.tokens_per_s is None or other.tokens_per_s is None:
            return False
        gain = 100 * (self.tokens_per_s / other.tokens_per_s - 1)
        return gain > max(LEAST_GAIN_PCT, self.spread_pct or 0, other.spread_pct or 0)


class Tuning(Record):
    """The search for the best stock configuration, the baseline of both arms."""

    trials: tuple[ConfigTrial, ...]
    """The first one is stock."""
    chosen: dict[str, JsonValue]
    """Arguments of the fastest trial; stock where none is faster by more than its spread, or not so
    once more beside stock (the last trials)."""
    workload: Workload | None = None
    environment: Environment | None = None
    """What it was looked for with; None in files of before that was kept."""

    def no_faster(self, arguments: Mapping[str, JsonValue]) -> bool:
        """Whether a trial with these arguments ran, and does not beat what was chosen."""
        found: dict[str, ConfigTrial] = {}
        for trial in self.trials:  # the last one of each counts: it ran beside the others
            for name, those in (("these", arguments), ("chosen", self.chosen)):
                if trial.arguments == those and trial.tokens_per_s is not None:
                    found[name] = trial
        return len(found) == 2 and not found["these"].beats(found["chosen"])


def overriding(
    wanted: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """What is wanted where the arguments say something else; what they leave out is the engine's
    to choose."""
    return {name: value for name, value in wanted.items() if arguments.get(name, value) != value}


def words(arguments: Mapping[str, JsonValue]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items()) or "stock"
