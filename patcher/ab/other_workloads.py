"""Losses that a patch may cause at other batch sizes and context lengths, and in memory."""

from __future__ import annotations

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Comparison, Record, Shape, Window
from patcher.bench.stats.compare import MIN_PAIRS

LIMIT_PCT = 1.0
"""Largest allowed loss of tokens per second at another point, in percent."""
MEMORY_LIMIT_PCT = 2.0


class OtherPoint(Record):
    """Patched against baseline at other traffic."""

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    """Context length in tokens of each sequence when decode begins."""
    comparison: Comparison
    """The comparison against a margin of the allowed loss."""
    windows: tuple[Window, ...] = ()
    """As measured."""

    @property
    def label(self) -> str:
        return Shape(batch=self.batch, context=self.context).label


class PeakMemory(Record):
    """Peak memory of the GPU in each arm. With one process: what torch allocated in one batch. With
    a process per arm: what the process reserved in all windows (the median of the arm's processes).
    """

    baseline_bytes: int = Field(gt=0)
    patched_bytes: int = Field(gt=0)

    @property
    def growth_pct(self) -> float:
        return 100 * (self.patched_bytes - self.baseline_bytes) / self.baseline_bytes


class OtherWorkloads(Record):
    """All measurements besides the workload of the verdict.

    The claim that no point loses needs no correction for the number of points, since each must hold
    on its own (an intersection-union test).
    """

    schema_version: int = SCHEMA_VERSION
    points: tuple[OtherPoint, ...] = ()
    memory: PeakMemory | None = None
    unusable: tuple[str, ...] = ()
    """Points without a usable pair."""
    limit_pct: float = Field(default=LIMIT_PCT, ge=0)
    """Declared before."""
    memory_limit_pct: float = Field(default=MEMORY_LIMIT_PCT, ge=0)

    def standing(self, point: OtherPoint) -> str:
        """Verdict at a point: `within`, `worse`, or `cannot be told`."""
        found = point.comparison
        if found.pairs >= MIN_PAIRS and found.gain_low_pct >= -self.limit_pct:
            return "within"
        if found.pairs >= MIN_PAIRS and found.gain_high_pct < -self.limit_pct:
            return "worse"
        return "cannot be told"

    @property
    def failures(self) -> list[str]:
        """Losses, for which the patch is rejected."""
        found = [
            f"it is slower at {point.label}: {point.comparison.figures}, "
            f"where a loss of {self.limit_pct:g} % is allowed"
            for point in self.points
            if self.standing(point) == "worse"
        ]
        if self.memory is not None and self.memory.growth_pct > self.memory_limit_pct:
            found.append(
                f"peak memory grows by {self.memory.growth_pct:.2f} %, "
                f"{self.memory_limit_pct:g} % is allowed"
            )
        return found

    @property
    def unknown(self) -> list[str]:
        """Possible losses, which prevent an accept."""
        return [
            f"at {point.label} a loss of over {self.limit_pct:g} % cannot be excluded: "
            f"{point.comparison.figures}, {point.comparison.pairs} pairs"
            for point in self.points
            if self.standing(point) == "cannot be told"
        ] + [f"at {label} no pair is usable" for label in self.unusable]

    @property
    def said(self) -> str:
        """The result in one sentence, for when nothing failed."""
        worst = min((one.comparison.gain_low_pct for one in self.points), default=None)
        parts = []
        if worst is not None:
            count = len(self.points)
            parts.append(
                f"no loss above {self.limit_pct:g} % at {count} other "
                f"point{'s' if count != 1 else ''} (lowest end {worst:+.2f} %)"
            )
        if self.memory is not None:
            parts.append(f"peak memory {self.memory.growth_pct:+.2f} %")
        return "; ".join(parts) or "no other traffic was measured"
