"""Stock configurations that were tried, and the best one: the baseline of both arms."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import AliasChoices, ConfigDict, Field, JsonValue

from patcher.bench.engines.switches import RefusedOption
from patcher.bench.machine.environment import Environment
from patcher.bench.records import Record
from patcher.bench.workload import Workload

LEAST_GAIN_PCT = 0.5
"""Smallest gain in percent that counts: trials run one after another, so less may be drift."""


class OtherWorkloadRate(Record):
    """Speed of the same process at other traffic, where another configuration may be best."""

    batch: int
    context: int
    """Prompt tokens."""
    tokens_per_s: float
    """Median over short windows."""
    spread_pct: float
    """Largest window over smallest, less one."""


class ConfigTrial(Record):
    """One configuration of the engine, and its speed."""

    model_config = ConfigDict(serialize_by_alias=True)

    arguments: dict[str, JsonValue]
    """Arguments of the engine, besides those of the workload; empty: stock."""
    tokens_per_s: float | None
    """Median over short windows; None if it did not run."""
    spread_pct: float | None = None
    """Largest window over smallest, less one."""
    other_workloads: tuple[OtherWorkloadRate, ...] = Field(
        default=(),
        validation_alias=AliasChoices("other_workloads", "elsewhere"),
        serialization_alias="elsewhere",
    )
    """Speeds at other traffic, if requested; the choice does not depend on them."""
    failure: str = ""

    def beats(self, other: ConfigTrial) -> bool:
        """Whether it is faster by more than the spread of the windows of either."""
        if self.tokens_per_s is None or other.tokens_per_s is None:
            return False
        gain = 100 * (self.tokens_per_s / other.tokens_per_s - 1)
        return gain > max(LEAST_GAIN_PCT, self.spread_pct or 0, other.spread_pct or 0)


class Tuning(Record):
    """The search for the best stock configuration, the baseline of both arms."""

    trials: tuple[ConfigTrial, ...]
    """The first one is stock."""
    chosen: dict[str, JsonValue]
    """Arguments of the fastest trial. Stock if none is faster by more than its spread, or if it is
    not faster again in a direct comparison (the last trials)."""
    workload: Workload | None = None
    environment: Environment | None = None
    """Where the search ran; None in older files."""
    refused: tuple[RefusedOption, ...] = ()
    """What was not tried."""
    served: str = ""
    """The client and its traffic, if the trials are servers over HTTP; their rate is then output
    tokens/s, the geometric mean over points."""

    def no_faster(self, arguments: Mapping[str, JsonValue]) -> bool:
        """Whether a trial with these arguments ran, and does not beat what was chosen."""
        found: dict[str, ConfigTrial] = {}
        for trial in self.trials:  # the last trial of each counts, since it ran beside the others
            for name, those in (("these", arguments), ("chosen", self.chosen)):
                if trial.arguments == those and trial.tokens_per_s is not None:
                    found[name] = trial
        return len(found) == 2 and not found["these"].beats(found["chosen"])


def overriding(
    wanted: Mapping[str, JsonValue], arguments: Mapping[str, JsonValue]
) -> dict[str, JsonValue]:
    """The arguments in `wanted` that differ from those in `arguments`. Arguments that are absent
    there are left out, since the engine chooses them.
    """
    return {name: value for name, value in wanted.items() if arguments.get(name, value) != value}


def words(arguments: Mapping[str, JsonValue]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items()) or "stock"
