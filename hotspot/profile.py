"""What a profile says: kernels as measured, hotspots as ranked."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from patcher.bench import SCHEMA_VERSION, Record

Triage = Literal["replace", "fuse", "closed", "configuration", "leave"]
"""`closed`: replace the call, the kernel's source is not to be had; `configuration`: first try
what a flag can do."""


class ProfileWarning(Record):
    """Something a reader of the figures must know."""

    kind: str
    """`graph_level`, `fallback`, `clipped_names`, `steps_unknown`, ..."""
    message: str


class Gpu(Record):
    """The GPU that was profiled, as far as the source or `gpus.toml` knows it."""

    name: str
    memory_bytes_per_s: float | None = None
    """Peak of the data sheet or the driver."""
    multiprocessors: int | None = None
    clock_hz: float | None = None
    """Highest clock of a multiprocessor."""
    compute_capability: str | None = None
    """`9.0`"""


class Counters(Record):
    """What Nsight Compute measured of one launch of a kernel, or the mean of several."""

    launches: int
    duration_ns: float | None = None
    dram_bytes: float | None = None
    """Read and written."""
    flops: float | None = None
    dram_throughput_pct: float | None = None
    """Of the peak, as Nsight Compute says."""
    sm_throughput_pct: float | None = None


class KernelStat(Record):
    """All launches of one kernel (or, on a CPU, one operator)."""

    name: str
    origin: str
    """Where its source is: see families.toml."""
    operation: str
    """What it computes: see families.toml."""
    instances: int
    total_ns: int
    """Sum over launches."""
    exposed_ns: int | None = None
    """Its part of the busy time: while it ran and nothing that had begun earlier still did. Adds
    up to `Profile.busy_ns`; None when the source has no times."""
    mean_ns: float
    median_ns: float | None
    """None where the source does not say."""
    min_ns: int | None
    max_ns: int | None
    share_pct: float
    """Of the sum over all kernels; recomputed, never read."""


class Variant(Record):
    """One kernel of a family."""

    name: str
    instances: int
    total_ns: int


class Hotspot(Record):
    """One row of the ranking: a kernel family, a fusion chain, memory operations, or idle time."""

    rank: int
    name: str
    kind: Literal["kernel", "chain", "memory", "idle"] = "kernel"
    """The time of `kernel` and `memory` rows adds up to the busy time; that of a `chain` is in its
    members' rows too; `idle` is what is left of the wall time."""
    share_pct: float
    """Of busy time; of the sum over kernels where the source has no times."""
    wall_pct: float | None = None
    exposed_ns: int | None = None
    """See `KernelStat`; of a chain it includes `gap_ns`."""
    total_ns: int = 0
    origin: str
    operation: str
    op: str | None
    """The op of the library that covers it."""
    as_one: str | None = None
    """Of a chain: the op of the library that is it as one kernel."""
    patch_points: tuple[str, ...] = ()
    """Where patcher can put another kernel: `engine: point`."""
    ceiling_pct: float
    """End-to-end gain in percent if it took no time (Amdahl): share / (1 - share), of the wall
    time where that is known."""
    reachable_pct: float | None = None
    """The same for a kernel at 80 % of the speed of light; of a chain whose bytes are not known,
    for one kernel as long as its longest member."""
    instances: int
    """Launches; of a chain, how often it runs."""
    mean_ns: float
    per_step: float | None = None
    """Launches per decode step, where steps are known."""
    per_layer: float | None = None
    bytes: float | None = None
    """Per launch: what must be moved (an op of the library) or was (Nsight Compute)."""
    flops: float | None = None
    """Per launch."""
    cost_source: str | None = None
    """Who says so: `op NAME` or `ncu`."""
    speed_of_light_ns: float | None = None
    """The least time for `bytes` and `flops` on this GPU, per launch."""
    sol_pct: float | None = Field(
        default=None, validation_alias=AliasChoices("sol_pct", "speed_of_light_pct")
    )
    """`speed_of_light_ns` as a share of the mean time."""
    triage: Triage = "leave"
    reason: str = ""
    """The triage's reason, one sentence."""
    variants: tuple[Variant, ...] = ()
    """What was folded into the row, where it is more than one; of a chain, its members."""
    gap_ns: int = 0
    """Of a chain: idle time between its launches."""

    @property
    def spent_ns(self) -> int:
        """What it is ranked by: its part of the busy time, else (no times known) of the sum."""
        return self.exposed_ns if self.exposed_ns is not None else self.total_ns


class StepLaunch(Record):
    """One launch of the step that is drawn."""

    kernel: int
    """Index into `Profile.kernels`."""
    start_ns: int
    """From the start of the step."""
    duration_ns: int
    stream: int
    chain: int | None = None
    """Index into `Profile.hotspots` of the chain that it belongs to."""


class Profile(Record):
    """One profile, read or captured."""

    schema_version: int = SCHEMA_VERSION
    model: str
    source: str
    """What it was read from: kind and file name, no folder."""
    gpu: Gpu | None = None
    window: str | None = None
    """Which part of the source is ranked, and why that part."""
    total_kernel_ns: int
    """Sum over kernels; overlapping streams count twice."""
    busy_ns: int | None
    """Union of the kernels' intervals, added over devices; None when the source has no times."""
    memory_ns: int | None = None
    """What copies and fills add to that union."""
    wall_ns: int | None = None
    """From the first launch to the end of the last, added over devices."""
    steps: int | None = None
    """Decode steps in it, where they can be told."""
    steps_source: str | None = None
    """How they were told."""
    layers: int | None = None
    launch_floor_ns: int | None = None
    """The shortest launch of any kernel that runs often: what an empty kernel takes."""
    warnings: tuple[ProfileWarning, ...] = ()
    kernels: tuple[KernelStat, ...]
    hotspots: tuple[Hotspot, ...]
    step: tuple[StepLaunch, ...] = ()
    """The launches of one decode step, the one of median length."""
