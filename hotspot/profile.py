"""What a profile says: kernels as measured, hotspots as ranked."""

from __future__ import annotations

from bench import SCHEMA_VERSION, Record


class ProfileWarning(Record):
    """Something a reader of the figures must know."""

    kind: str
    """`graph_level`, `fallback`, `clipped_names`, `steps_unknown`, ..."""
    message: str


class KernelStat(Record):
    """All launches of one kernel (or, on a CPU, one operator)."""

    name: str
    origin: str
    """Where its source is: see families.toml."""
    operation: str
    """What it computes: see families.toml."""
    instances: int
    total_ns: int
    mean_ns: float
    median_ns: float | None
    """None where the source does not say."""
    min_ns: int | None
    max_ns: int | None
    share_pct: float
    """Of the sum over all kernels; recomputed, never read."""


class Hotspot(Record):
    """One row of the ranking."""

    rank: int
    name: str
    share_pct: float
    origin: str
    operation: str
    op: str | None
    """The op of the library that covers it."""
    ceiling_pct: float
    """End-to-end gain in percent if the kernel took no time (Amdahl): share / (1 - share)."""
    instances: int
    mean_ns: float
    per_step: float | None = None
    """Launches per decode step, where steps are known."""


class Profile(Record):
    """One profile, read or captured."""

    schema_version: int = SCHEMA_VERSION
    model: str
    source: str
    """What it was read from: kind and file name, no folder."""
    total_kernel_ns: int
    """Sum over kernels; overlapping streams count twice."""
    busy_ns: int | None
    """Union of the kernels' intervals; None when the source has no times."""
    steps: int | None = None
    """Decode steps in it, where they can be told."""
    warnings: tuple[ProfileWarning, ...] = ()
    kernels: tuple[KernelStat, ...]
    hotspots: tuple[Hotspot, ...]
