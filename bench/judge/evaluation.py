"""Records of an evaluation: outcome, checks, timings and hardware counters."""

from __future__ import annotations

import math
from enum import StrEnum

from pydantic import AliasChoices, Field, model_validator

from patcher.bench.machine.environment import Environment
from patcher.bench.records import SCHEMA_VERSION, Record


class Outcome(StrEnum):
    """How an evaluation ended. The first five are those of KForge (arXiv 2606.02963)."""

    GENERATION_FAILURE = "generation_failure"
    """The reply contained no usable source."""
    COMPILATION_FAILURE = "compilation_failure"
    """The source does not compile."""
    RUNTIME_ERROR = "runtime_error"
    """The candidate raised, crashed, hung or exited."""
    MISMATCH = "mismatch"
    """The candidate wrote wrong values."""
    GUARD_VIOLATION = "guard_violation"
    """The candidate wrote where the contract forbids it, or broke a rule of the judge."""
    TOO_SLOW = "too_slow"
    """The candidate is correct, but no faster than the baseline."""
    CORRECT = "correct"
    """The candidate is correct and faster than the baseline."""
    COMPILED = "compiled"
    """The candidate compiles, and this machine cannot run its language. It is neither checked nor
    timed, and is never accepted or bundled."""


class Grade(StrEnum):
    """On CUDA: in which process a candidate's calls were timed and checked."""

    DEVICE_CODE = "device code alone"
    """In one of the judge's, which holds its kernels and none of its host code."""
    OWN_PROCESS = "its own process"
    """In the candidate's, whose reports of time the judge can only hold against its own clock."""


class Check(Record):
    """The result of one check of the judge."""

    name: str
    """Name of the check."""
    passed: bool
    """Whether the candidate passed it."""
    detail: str
    """What the check found."""


class Timing(Record):
    """Times of candidate and baseline at one point of the sweep, from interleaved blocks."""

    axes: dict[str, int]
    """Size of each axis at the point."""
    candidate_us: float
    """Median time of one call of the candidate, in microseconds."""
    baseline_us: float
    """Median time of one call of the baseline, in microseconds."""
    speedup: float
    """Baseline time over candidate time: the Hodges-Lehmann estimate over pairs of blocks."""
    speedup_low: float
    """Lower end of the 95 % interval of `speedup`."""
    speedup_high: float
    """Upper end of the 95 % interval of `speedup`."""
    pairs: int
    """Number of pairs of blocks used for the interval."""
    calls: int
    """Number of timed calls of the candidate."""
    dropped_pairs: int = 0
    """Number of pairs left out because the GPU throttled or its clock drifted."""
    sol_pct: float | None = Field(
        default=None, validation_alias=AliasChoices("sol_pct", "light_pct")
    )
    """Percent of the speed of light: the time of the contract's bytes and arithmetic at the
    machine's measured ceilings, over `candidate_us`."""
    launch_pct: float | None = None
    """CUDA: percent of the launch floor: the time of the machine's shortest kernel in a graph, over
    `candidate_us`. A kernel that moves few bytes is close to it, not to the speed of light."""
    candidate_cold_us: float | None = None
    """CUDA: median time in microseconds of a call of the candidate after overwriting L2."""
    baseline_cold_us: float | None = None
    """CUDA: median time in microseconds of a call of the baseline after overwriting L2."""
    candidate_eager_us: float | None = None
    """CUDA: median time in microseconds of a call of the candidate outside a graph, including the
    launch."""
    baseline_eager_us: float | None = None
    """CUDA: median time in microseconds of a call of the baseline outside a graph, including the
    launch."""


class Counter(Record):
    """One hardware counter of a kernel."""

    value: float
    """Mean over launches."""
    unit: str
    """Base unit of Nsight Compute: byte, byte/s, %, ..."""
    metric: str
    """Nsight Compute's name of the metric."""


class KernelCounters(Record):
    """Nsight Compute's counters of one kernel at one size."""

    kernel: str
    """Name of the kernel."""
    library: str | None
    """Library that the kernel belongs to, by its name; None: the candidate's own kernel."""
    grid: str
    """Grid size, as Nsight Compute prints it."""
    block: str
    """Block size, as Nsight Compute prints it."""
    launches: int
    """Number of profiled launches; the values are their mean."""
    duration_us: float | None
    """Mean duration in microseconds with flushed caches. Verdicts do not use it."""
    values: dict[str, Counter]
    """Counters by their key in `bench/judge/counters.toml`."""


class BaselineTime(Record):
    """The time of one baseline on this machine, or the reason why it does not run."""

    time_us: float | None = None
    """Geometric mean over the sweep, in microseconds."""
    missing: str | None = None
    """Why the baseline does not run on this machine."""
    installed: bool = False
    """For one that does not run: whether its packages are installed, so that it failed. A verdict
    without it may be against a slower baseline."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Read older evaluations, which hold `9.72 us` or the reason as text."""
        if not isinstance(value, str):
            return value
        figure, _, unit = value.rpartition(" ")
        try:
            return {"time_us": float(figure)} if unit == "us" else {"missing": value}
        except ValueError:
            return {"missing": value}

    @model_validator(mode="after")
    def _time_or_reason(self) -> BaselineTime:
        if (self.time_us is None) == (self.missing is None):
            raise ValueError("a baseline has a time, or a reason why it has none")
        return self

    def __str__(self) -> str:
        return f"{self.time_us:.3g} us" if self.time_us is not None else str(self.missing)


class Evaluation(Record):
    """The judge's result for one candidate."""

    schema_version: int = SCHEMA_VERSION
    op: str
    """Name of the op."""
    language: str
    """Language of the candidate."""
    digest: str
    """SHA-256 of the candidate's source."""
    outcome: Outcome
    """How the evaluation ended."""
    checks: tuple[Check, ...] = ()
    """Results of the checks in the order they ran."""
    tripwires: tuple[str, ...] = ()
    """Tripwire hits in the source, and libraries whose kernels ran according to CUPTI."""
    baseline: str | None = None
    """Baseline of all speedups: the strongest that runs here, unless another one was chosen."""
    baselines: dict[str, BaselineTime] = Field(default_factory=dict)
    """Time of each known baseline, by name."""
    sweep: str | None = None
    """Name of the sweep that was timed; it determines the dtypes."""
    timings: tuple[Timing, ...] = ()
    """Times at each point of the sweep."""
    timing_method: str | None = None
    """How calls were timed, in words."""
    geomean_speedup: float | None = None
    """Geometric mean of the speedups over the points of the sweep."""
    counters: tuple[KernelCounters, ...] = ()
    """Hardware counters of the candidate's kernels at the largest sweep point, if requested."""
    grade: Grade | None = None
    """CUDA: how it was timed and checked. None: that was not asked for."""
    grade_reason: str = ""
    """Why it was not timed and checked as device code alone."""
    sandbox: str | None = None
    """Confinement of the candidate's process, in words."""
    outputs_sha256: str | None = None
    """SHA-256 of all outputs compared before timing, if `Judge.evaluate` was given a seed."""
    log: str = ""
    """Compiler output or traceback, clipped; feedback for the generation agent."""
    environment: Environment | None = None
    """Device, versions and clocks of the measurement."""
    build_s: float | None = None
    """Build time in seconds."""
    total_s: float | None = None
    """Time of the whole evaluation in seconds."""
    phases_s: dict[str, float] = Field(default_factory=dict)
    """That time by stage, in their order; empty in older records."""

    @model_validator(mode="after")
    def _timed_if_right(self) -> Evaluation:
        if self.right and (not self.timings or self.geomean_speedup is None):
            raise ValueError(f"outcome {self.outcome} needs timings and a geomean speedup")
        if self.right and not all(check.passed for check in self.checks):
            raise ValueError(f"outcome {self.outcome} with a failed check")
        ran = self.timings or self.geomean_speedup is not None or self.baseline is not None
        if self.outcome is Outcome.COMPILED and ran:
            raise ValueError("outcome compiled says that nothing was run or timed")
        return self

    @property
    def right(self) -> bool:
        """Whether the candidate ran and passed every check, regardless of its speed."""
        return self.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)

    @property
    def lower_grade(self) -> str:
        """What is to be said of it if it was not judged as device code alone; else empty."""
        if self.grade is not Grade.OWN_PROCESS:
            return ""
        return f"judged in {self.grade}, a lower grade than {Grade.DEVICE_CODE}"

    @property
    def missing_baselines(self) -> tuple[str, ...]:
        """Names of the baselines that do not run on this machine."""
        return tuple(name for name, time in self.baselines.items() if time.missing is not None)

    @property
    def failed_baselines(self) -> tuple[str, ...]:
        """Names of the baselines that are installed on this machine, but failed."""
        return tuple(name for name, time in self.baselines.items() if time.installed)

    @property
    def sol_share(self) -> float | None:
        """Geometric mean over the timed points of the share of the speed of light, at most 1.

        Its inverse is the largest speedup that is still possible. None if the share of a point is
        unknown.
        """
        shares = [timing.sol_pct for timing in self.timings]
        known = [min(share / 100, 1.0) for share in shares if share is not None and share > 0]
        return geomean(known) if known and len(known) == len(shares) else None

    @property
    def failed_checks(self) -> list[Check]:
        """The checks that the candidate did not pass."""
        return [check for check in self.checks if not check.passed]


def geomean(values: list[float]) -> float:
    """Geometric mean of positive values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("geomean of nothing")
    return math.exp(sum(math.log(value) for value in values) / len(values))
