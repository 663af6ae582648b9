"""What a patch must not cost elsewhere: other batch sizes and context lengths, and memory."""

from __future__ import annotations

from pydantic import Field

from patcher.bench import SCHEMA_VERSION, Comparison, Record, Shape, Window
from patcher.bench.stats.compare import MIN_PAIRS

LIMIT_PCT = 1.0
"""Tokens per second that may be lost at another point."""
MEMORY_LIMIT_PCT = 2.0


class OtherPoint(Record):
    """Patched against baseline at other traffic."""

    batch: int = Field(ge=1)
    context: int = Field(ge=1)
    """Tokens of each sequence when its decode begins."""
    comparison: Comparison
    """Against a margin of what may be lost."""
    windows: tuple[Window, ...] = ()
    """As measured."""

    @property
    def label(self) -> str:
        return Shape(batch=self.batch, context=self.context).label


class PeakMemory(Record):
    """Of the GPU: what torch took in one batch of each arm; where each arm is a process, what it
    reserved in all its windows (the median of the arm's processes).
    """

    baseline_bytes: int = Field(gt=0)
    patched_bytes: int = Field(gt=0)

    @property
    def growth_pct(self) -> float:
        return 100 * (self.patched_bytes - self.baseline_bytes) / self.baseline_bytes


class OtherWorkloads(Record):
    """All that was measured beside the workload of the verdict.

    That no point lost is a claim about each of them, so it needs no correction for their number:
    each must hold on its own (an intersection-union test).
    """

    schema_version: int = SCHEMA_VERSION
    points: tuple[OtherPoint, ...] = ()
    memory: PeakMemory | None = None
    unusable: tuple[str, ...] = ()
    """Points at which no pair could be used."""
    limit_pct: float = Field(default=LIMIT_PCT, ge=0)
    """Declared before."""
    memory_limit_pct: float = Field(default=MEMORY_LIMIT_PCT, ge=0)

    def standing(self, point: OtherPoint) -> str:
        """`within`, `worse`, or `cannot be told`."""
        found = point.comparison
        if found.pairs >= MIN_PAIRS and found.gain_low_pct >= -self.limit_pct:
            return "within"
        if found.pairs >= MIN_PAIRS and found.gain_high_pct < -self.limit_pct:
            return "worse"
        return "cannot be told"

    @property
    def failures(self) -> list[str]:
        """What keeps the patch from being accepted."""
        found = [
            f"it is slower at {point.label}: {point.comparison.figures}, "
            f"{self.limit_pct:g} % may be lost"
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
        """What keeps an accept from being given: it may be worse there."""
        return [
            f"at {point.label} it cannot be told whether more than {self.limit_pct:g} % is lost: "
            f"{point.comparison.figures}, {point.comparison.pairs} pairs"
            for point in self.points
            if self.standing(point) == "cannot be told"
        ] + [f"at {label} no pair can be used" for label in self.unusable]

    @property
    def said(self) -> str:
        """What holds, in a sentence; of use where nothing failed."""
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
        return "; ".join(parts) or "nothing was measured elsewhere"
