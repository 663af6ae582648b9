"""The records of a profile: kernels as measured, hotspots as ranked."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from patcher.bench import SCHEMA_VERSION, Record
from patcher.hotspot.marks import Phase
from patcher.hotspot.step_record import StepLedger

Triage = Literal["replace", "fuse", "closed", "configuration", "leave"]
"""What to do about a row. `closed`: the kernel has no public source, so replace the call.
`configuration`: try the engine's options first."""


class ProfileWarning(Record):
    """A limitation of the profile that a reader of the figures must know."""

    kind: str
    """`graph_level`, `fallback`, `clipped_names`, `steps_unknown`, ..."""
    message: str
    """The limitation in one sentence."""


class Gpu(Record):
    """The GPU that was profiled, as far as the source or `gpus.toml` describes it."""

    name: str
    memory_bytes_per_s: float | None = None
    """Peak DRAM bandwidth from the data sheet or the driver, bytes/s."""
    multiprocessors: int | None = None
    """Number of streaming multiprocessors."""
    clock_hz: float | None = None
    """Highest clock of a multiprocessor, Hz."""
    compute_capability: str | None = None
    """For example `9.0`."""


class Counters(Record):
    """Nsight Compute's counters for one launch of a kernel, or their mean over several."""

    launches: int
    """Launches in the mean."""
    duration_ns: float | None = None
    dram_bytes: float | None = None
    """Bytes read from and written to DRAM."""
    flops: float | None = None
    """Floating-point operations."""
    dram_throughput_pct: float | None = None
    """DRAM throughput as a percentage of the peak."""
    sm_throughput_pct: float | None = None
    """Multiprocessor throughput as a percentage of the peak."""


class KernelStat(Record):
    """All launches of one kernel (or, on a CPU, one operator)."""

    name: str
    """The kernel's name as the source spells it."""
    origin: str
    """Whose source it is, by the rules of `families.toml`."""
    operation: str
    """What it computes, by the rules of `families.toml`."""
    instances: int
    """Number of launches."""
    total_ns: int
    """Sum over launches."""
    exposed_ns: int | None = None
    """Its part of the busy time: time in which no earlier kernel was still running. The parts add
    up to `Profile.busy_ns`; None if the source has no times."""
    mean_ns: float
    """Mean time of a launch."""
    median_ns: float | None
    """Median time of a launch; None if the source does not give it, as below."""
    min_ns: int | None
    max_ns: int | None
    share_pct: float
    """Percentage of the sum over all kernels; always computed here, never read."""


class Variant(Record):
    """One kernel of a family."""

    name: str
    instances: int
    """Number of launches."""
    total_ns: int
    """Sum over launches."""


class Hotspot(Record):
    """One row of the ranking: a kernel family, a fusion chain, memory operations, or idle time."""

    rank: int
    """Position in the ranking, from 1."""
    name: str
    kind: Literal["kernel", "chain", "memory", "idle"] = "kernel"
    """The times of `kernel` and `memory` rows add up to the busy time. The time of a `chain` is in
    its members' rows too. `idle` is the rest of the wall time."""
    share_pct: float
    """Percentage of busy time; of the sum over kernels if the source has no times."""
    wall_pct: float | None = None
    """Percentage of wall time; None if the source has no times."""
    exposed_ns: int | None = None
    """See `KernelStat`; for a chain it includes `gap_ns`."""
    total_ns: int = 0
    """Sum over launches."""
    origin: str
    """Whose source it is; see `KernelStat`."""
    operation: str
    """What it computes; see `KernelStat`."""
    op: str | None
    """The op of the library that covers it."""
    instead: str | None = None
    """An op whose patch point takes the place of this kernel, though its name does not say so:
    in some layers, or with other launches."""
    as_one: str | None = None
    """For a chain: the op of the library that computes it in one kernel."""
    patch_points: tuple[str, ...] = ()
    """Where patcher can replace the kernel, as `engine: point`."""
    refusal: str = ""
    """The op of the library that computes it, and why no patch point takes it in this model."""
    ceiling_pct: float
    """Gain in percent if it took no time (Amdahl): share / (1 - share). The share is of the wall
    time, so the gain is end to end; in a summary it is of kernel time (`Profile.ceiling_of`)."""
    reachable_pct: float | None = None
    """The same gain for a kernel at 80 % of the speed of light. For a chain: for one kernel that
    takes as long as its longest member."""
    instances: int
    """Launches; for a chain, how often it runs."""
    mean_ns: float
    """Mean time of a launch."""
    per_step: float | None = None
    """Launches per step of one device, if steps are known."""
    per_layer: float | None = None
    """Launches per step and layer of one device, if both are known."""
    bytes: float | None = None
    """Bytes per launch: the least by an op's contract, or what Nsight Compute measured."""
    flops: float | None = None
    """Floating-point operations per launch."""
    cost_source: str | None = None
    """Source of `bytes` and `flops`: `op NAME` or `ncu`."""
    dram_pct: float | None = None
    """DRAM throughput as a share of the peak, as Nsight Compute measured it."""
    sm_pct: float | None = None
    """Multiprocessor throughput as a share of the peak, as Nsight Compute measured it."""
    speed_of_light_ns: float | None = None
    """Least time of a launch for `bytes` and `flops` on this GPU."""
    sol_pct: float | None = Field(
        default=None, validation_alias=AliasChoices("sol_pct", "speed_of_light_pct")
    )
    """`speed_of_light_ns` as a share of the mean time."""
    triage: Triage = "leave"
    """What to do about the row."""
    reason: str = ""
    """The reason for the triage decision, one sentence."""
    variants: tuple[Variant, ...] = ()
    """The kernels of a family of more than one; for a chain, its members."""
    gap_ns: int = 0
    """For a chain: idle time between its launches."""

    @property
    def spent_ns(self) -> int:
        """The ranking key: `exposed_ns`, or `total_ns` if the source has no times."""
        return self.exposed_ns if self.exposed_ns is not None else self.total_ns


class StepLaunch(Record):
    """One launch of the representative step."""

    kernel: int
    """Index into `Profile.kernels`."""
    start_ns: int
    """From the start of the step."""
    duration_ns: int
    stream: int
    chain: int | None = None
    """Index into `Profile.hotspots` of the chain that it belongs to."""


class DeviceProfile(Record):
    """One device of a profile of several."""

    device: int
    """Its number in the source; in merged traces, which repeat numbers, a new one."""
    label: str | None = None
    """What the source calls it, if its number is new."""
    gpu: Gpu | None = None
    launches: int
    """Kernel launches that are ranked."""
    total_kernel_ns: int
    """Sum over kernels; overlapping streams count twice."""
    busy_ns: int
    """Union of the kernels' intervals."""
    memory_ns: int
    """Time that copies and fills add to that union."""
    wall_ns: int
    """From the first launch to the end of the last."""
    collectives_ns: int
    """Part of the busy time in collectives, waiting for other devices included."""
    steps: int | None = None
    phase: Phase | None = None
    bound: str | None = None
    """See `Profile.bound`."""
    bound_pct: float | None = None
    hotspots: tuple[Hotspot, ...]
    """Its own ranking, the largest row first."""


class Profile(Record):
    """One profile, read from a file or captured."""

    schema_version: int = SCHEMA_VERSION
    model: str
    """The model's name, or a preset's."""
    source: str
    """Kind and file name of the source, without its folder."""
    gpu: Gpu | None = None
    """The GPU; None if the source does not name it."""
    window: str | None = None
    """The part of the source that is ranked, and why."""
    total_kernel_ns: int
    """Sum over kernels; overlapping streams count twice."""
    busy_ns: int | None
    """Union of the kernels' intervals, added over devices; None if the source has no times."""
    memory_ns: int | None = None
    """Time that copies and fills add to that union."""
    wall_ns: int | None = None
    """From the first launch to the end of the last, added over devices."""
    steps: int | None = None
    """Steps in the profile, on each device; None if unknown."""
    steps_source: str | None = None
    """How the steps were recognised."""
    phase: Phase | None = None
    """What the steps compute, as the engine's ranges say; None if nothing says it."""
    layers: int | None = None
    """Layers of the model; None if unknown."""
    launch_floor_ns: int | None = None
    """The shortest launch of any frequent kernel: an estimate for an empty kernel."""
    warnings: tuple[ProfileWarning, ...] = ()
    kernels: tuple[KernelStat, ...]
    """Statistics of each kernel, in order of decreasing `total_ns`."""
    hotspots: tuple[Hotspot, ...]
    """The ranking, the largest row first."""
    step: tuple[StepLaunch, ...] = ()
    """The launches of the step of median length; of several devices, of the busiest."""
    bound: str | None = None
    """The longest part of the wall time: `kernels`, `collectives`, `copies`, `launches` (gaps of up
    to 100 us) or `the host` (longer ones)."""
    bound_pct: float | None = None
    """Its share of the wall time."""
    ceiling_of: Literal["wall time", "kernel time"] = "wall time"
    """What ceilings are gains in."""
    devices: tuple[DeviceProfile, ...] = ()
    """Each device by itself; empty if there is only one. The other fields add them up."""
    ledger: StepLedger | None = None
    """A step against the floor of its model, if it was asked for."""
