"""What is remembered: rules with counts, techniques with measured gains."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from patcher.bench import Language, Record

PROMOTED = 3
"""Sightings of a rule before it enters prompts (AdaExplore, `skill_memory/`)."""
SEEN_KEPT = 64
"""Sightings that an entry remembers, so that none counts twice."""

Line = Annotated[str, Field(min_length=1, max_length=400, pattern=r"^[^\r\n]*$")]


class Observation(Record):
    """One candidate of one run, as digests that name neither."""

    run: str
    candidate: str

    @classmethod
    def of(cls, run: str, candidate: str) -> Observation:
        return cls(run=_short(run), candidate=_short(candidate))

    def __str__(self) -> str:
        return f"{self.run}-{self.candidate}"


class _MemoryEntry(Record):
    id: str = ""
    """Given where a person left it out."""
    text: Line
    language: Language | None = None
    """None: any."""
    count: int = Field(PROMOTED, ge=0)
    """How often it was seen, in distinct candidates."""
    seen: tuple[str, ...] = ()
    """The latest sightings."""
    last: str = ""
    """The day of the latest, UTC."""
    muted: bool = False
    """Kept and counted, never shown to a model."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("id"):
            return {**values, "id": identifier(str(values.get("text")))}
        return values

    def saw(self, sighting: Observation) -> bool:
        return any(known.rpartition("-")[2] == sighting.candidate for known in self.seen)

    def _with(self, sighting: Observation) -> tuple[str, ...]:
        return (*self.seen, str(sighting))[-SEEN_KEPT:]


class MemoryRule(_MemoryEntry):
    """One `[[rule]]` of `rules.toml`: "you cannot ... because ..."."""

    failure: str = ""
    """What it was recognised by: a name of `patterns.toml`, or the check that failed."""
    families: tuple[str, ...] = ()
    """Operations of the ops where it was seen; empty: any."""
    architectures: tuple[str, ...] = ()

    @property
    def promoted(self) -> bool:
        return self.count >= PROMOTED and not self.muted

    @property
    def runs(self) -> int:
        return len({known.partition("-")[0] for known in self.seen})

    def again(self, sighting: Observation, family: str, architecture: str, day: str) -> MemoryRule:
        """The rule after one more candidate broke it; the text stays as it is."""
        if self.saw(sighting):
            return self
        return self.model_copy(
            update={
                "count": self.count + 1,
                "families": tuple(sorted({*self.families, family})),
                "architectures": tuple(sorted({*self.architectures, architecture})),
                "seen": self._with(sighting),
                "last": day,
            }
        )


class Gain(_MemoryEntry):
    """One `[[technique]]` of `techniques.toml`: what a change was worth, for one kind of op, shape,
    language and device."""

    technique: str
    """A name of `patterns.toml`, or empty where the text alone says it."""
    family: str
    """The op's operation: `norm`, `rope`, `moe`, ..."""
    shapes: str
    """By the bytes that a call must move, see `shapes_of`."""
    device: str
    architecture: str
    """`sm_90`, or `cpu`."""
    count: int = Field(0, ge=0)
    """Candidates that were right, and so measured."""
    gain: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Geometric mean of (time before the change) / (time after it)."""
    spread_pct: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of the gains' logarithms, in percent; 0 of a single one."""
    failed: int = Field(0, ge=0)
    """Candidates that were not right, and so not measured."""

    @field_validator("shapes")
    @classmethod
    def _bucket(cls, value: str) -> str:
        if value not in SHAPES:
            raise ValueError(f"not one of: {', '.join(SHAPES)}")
        return value

    def again(self, sighting: Observation, gain: float | None, day: str) -> Gain:
        """After one more candidate; `gain` is None for one that was not right."""
        if self.saw(sighting):
            return self
        known = {"seen": self._with(sighting), "last": day}
        if gain is None:
            return self.model_copy(update={**known, "failed": self.failed + 1})
        # Welford's update, from what the file holds
        mean, spread, n = math.log(self.gain), self.spread_pct / 100, self.count
        away = math.log(gain) - mean
        squares = spread**2 * max(n - 1, 0) + away**2 * n / (n + 1)
        return self.model_copy(
            update={
                **known,
                "count": n + 1,
                "gain": round(math.exp(mean + away / (n + 1)), 5),
                "spread_pct": round(100 * math.sqrt(squares / n), 4) if n else 0.0,
            }
        )


SHAPES = ("under 1 MiB", "1 to 32 MiB", "over 32 MiB")
"""Small ones are bound by launch and latency, middle ones live in a cache, large ones in memory."""


def shapes_of(bytes_moved: int) -> str:
    """The bucket of a call that must move so many bytes."""
    return SHAPES[(bytes_moved >= 1 << 20) + (bytes_moved > 32 << 20)]


def identifier(*parts: str) -> str:
    return "-".join([*(re.findall(r"[a-z]+", parts[0].lower())[:3]), _short("\0".join(parts))[:6]])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
