"""What the judge says about one candidate: outcome, checks and timings."""

from __future__ import annotations

import math
from enum import StrEnum

from pydantic import AliasChoices, Field, model_validator

from patcher.bench.machine.environment import Environment
from patcher.bench.records import SCHEMA_VERSION, Record


class Outcome(StrEnum):
    """Every way an evaluation can end; the first five are those of KForge (arXiv 2606.02963)."""

    GENERATION_FAILURE = "generation_failure"
    """The reply held no usable source."""
    COMPILATION_FAILURE = "compilation_failure"
    RUNTIME_ERROR = "runtime_error"
    """It raised, crashed, hung or exited."""
    MISMATCH = "mismatch"
    """It wrote wrong values."""
    GUARD_VIOLATION = "guard_violation"
    """It touched what the contract forbids, or broke a rule of the judge."""
    TOO_SLOW = "too_slow"
    """Right, and no faster than the strongest baseline."""
    CORRECT = "correct"
    """Right and faster."""
    COMPILED = "compiled"
    """It compiles, and that is all: nothing here runs its language, so it is neither judged nor
    timed, and never accepted or bundled."""


class Check(Record):
    """One thing the judge looked at."""

    name: str
    passed: bool
    detail: str


class Timing(Record):
    """Candidate against baseline at one point of the sweep, from interleaved blocks."""

    axes: dict[str, int]
    candidate_us: float
    """Median time of one call."""
    baseline_us: float
    speedup: float
    """Baseline time over candidate time: the geometric mean over pairs of blocks."""
    speedup_low: float
    """Lower end of the 95 % interval of `speedup`."""
    speedup_high: float
    pairs: int
    """Pairs of blocks behind the interval."""
    calls: int
    """Timed calls behind `candidate_us`."""
    dropped_pairs: int = 0
    """Pairs left out because the GPU throttled or its clock drifted."""
    sol_pct: float | None = Field(
        default=None, validation_alias=AliasChoices("sol_pct", "light_pct")
    )
    """Share of the speed of light: the time that the contract's bytes and arithmetic take at the
    machine's measured ceilings, over `candidate_us`."""
    launch_pct: float | None = None
    """CUDA: share of the launch floor: the time of this machine's shortest kernel in a graph, over
    `candidate_us`. What moves few bytes is near it and not near the speed of light."""
    candidate_cold_us: float | None = None
    """CUDA: with L2 overwritten before each call."""
    baseline_cold_us: float | None = None
    candidate_eager_us: float | None = None
    """CUDA: outside of a graph, with the launch."""
    baseline_eager_us: float | None = None


class Counter(Record):
    """One hardware counter of a kernel."""

    value: float
    unit: str
    """Of Nsight Compute's base units: byte, byte/s, %, ..."""
    metric: str
    """Nsight Compute's name for it."""


class KernelCounters(Record):
    """What Nsight Compute counted in one kernel at one size."""

    kernel: str
    library: str | None
    """Whose kernel it is by its name; None: the candidate's own."""
    grid: str
    block: str
    launches: int
    """That were counted; the values are their mean."""
    duration_us: float | None
    """With caches flushed before: not the time that it is judged by."""
    values: dict[str, Counter]
    """By the keys of `bench/judge/counters.toml`."""


class BaselineTime(Record):
    """How fast one known baseline is on this machine, or why it does not run."""

    time_us: float | None = None
    """Geometric mean over the sweep, in microseconds."""
    missing: str | None = None
    """Why it does not run here."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        """Evaluations of before hold `9.72 us`, or the reason, as text."""
        if not isinstance(value, str):
            return value
        figure, _, unit = value.rpartition(" ")
        try:
            return {"time_us": float(figure)} if unit == "us" else {"missing": value}
        except ValueError:
            return {"missing": value}

    @model_validator(mode="after")
    def _one_of_them(self) -> BaselineTime:
        if (self.time_us is None) == (self.missing is None):
            raise ValueError("a baseline has a time, or a reason why it has none")
        return self

    def __str__(self) -> str:
        return f"{self.time_us:.3g} us" if self.time_us is not None else str(self.missing)


class Evaluation(Record):
    """The judge's whole word on one candidate."""

    schema_version: int = SCHEMA_VERSION
    op: str
    language: str
    digest: str
    """sha256 of the candidate's source."""
    outcome: Outcome
    checks: tuple[Check, ...] = ()
    tripwires: tuple[str, ...] = ()
    """What it was noticed for: words of its source, and libraries whose kernels ran by CUPTI."""
    baseline: str | None = None
    """The strongest baseline that runs here, which every speedup is against."""
    baselines: dict[str, BaselineTime] = Field(default_factory=dict)
    """Each known baseline by name."""
    sweep: str | None = None
    """Which sweep of the contract was timed: the dtypes of the timings are its."""
    timings: tuple[Timing, ...] = ()
    timing_method: str | None = None
    geomean_speedup: float | None = None
    counters: tuple[KernelCounters, ...] = ()
    """Of its own kernels at the largest swept point, where they were asked for."""
    sandbox: str | None = None
    """What confined the candidate."""
    outputs_sha256: str | None = None
    """Of all compared outputs before timing: with `JudgeSettings.seed` it repeats bit by bit."""
    log: str = ""
    """Compiler output or traceback, clipped; feedback for the generation agent."""
    environment: Environment | None = None
    build_s: float | None = None
    total_s: float | None = None

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
        """Whether it was judged and passed every check, however fast it is."""
        return self.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW)

    @property
    def missing_baselines(self) -> tuple[str, ...]:
        """Known baselines that did not run here: nothing is said about these."""
        return tuple(name for name, found in self.baselines.items() if found.missing is not None)

    @property
    def sol_share(self) -> float | None:
        """Geometric mean over the timed points of the share of the speed of light, at most 1: its
        inverse is the most by which the score can still grow. None where a point's share is not
        known."""
        shares = [timing.sol_pct for timing in self.timings]
        known = [min(share / 100, 1.0) for share in shares if share is not None and share > 0]
        return geomean(known) if known and len(known) == len(shares) else None

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]


def geomean(values: list[float]) -> float:
    """Geometric mean of positive values."""
    if not values:
        raise ValueError("geomean of nothing")
    return math.exp(sum(math.log(value) for value in values) / len(values))
