"""Records of a comparison: window, sample, and the result with its interval and verdict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from patcher.bench.records import SCHEMA_VERSION, Record

Arm = Literal["baseline", "patched"]
Verdict = Literal["accept", "reject", "inconclusive"]


class Window(Record):
    """One timed window of decode. The two windows of a pair use the same prompts."""

    pair: int
    """Number of the pair that the window belongs to."""
    arm: Arm
    """Arm that ran."""
    kind: Literal["ab", "aa"]
    """`ab`: baseline against patched. `aa`: baseline on both sides, the control."""
    tokens: int
    """Output tokens counted by the caller, without the first token, which prefill produces."""
    decode_s: float
    """Decode time in seconds."""
    prefill_s: float
    """Prefill time in seconds."""
    sm_clock_mhz: int | None = None
    """Median SM clock of the samples in the window, in MHz."""
    sm_clock_range_mhz: tuple[int, int] | None = None
    """Lowest and highest SM clock of those samples, in MHz."""
    memory_clock_mhz: int | None = None
    """Memory clock in MHz."""
    temperature_c: int | None = None
    """Highest GPU temperature in degrees Celsius."""
    power_w: float | None = None
    """Power of the board in watts."""
    throttle_reasons: tuple[str, ...] = ()
    """Throttle reasons of all samples in the window."""
    kernel_calls: int | None = None
    """Calls of the patched kernel during the window; None if they were not counted."""
    turns_s: tuple[float, ...] = ()
    """Seconds of the timed steps of each turn; empty if they were not recorded."""
    process: int | None = Field(default=None, ge=0)
    """Process pair that the window ran in, see `Sample`."""
    swapped: bool | None = None
    """Whether the arms swapped places, see `Sample`."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of decode."""
        return self.tokens / self.decode_s

    def step_s(self, batch: int) -> float:
        """Seconds of one timed decode step with `batch` sequences."""
        return batch * self.decode_s / self.tokens


class Sample(Record):
    """One recorded sample: `{"pair", "arm", "tokens_per_s"}`, optionally with `"process"` and
    `"swapped"`.
    """

    pair: int = Field(ge=0)
    """Number of the pair."""
    arm: Arm
    """Arm that ran."""
    tokens_per_s: float = Field(gt=0, allow_inf_nan=False)
    """Output tokens per second of decode."""
    process: int | None = Field(default=None, ge=0)
    """Number of the process pair that the pair ran in. Each fresh pair of processes has its own."""
    swapped: bool | None = None
    """Whether the arms swapped places in this process pair: the patched process started first,
    where the baseline usually does."""


class Comparison(Record):
    """The patched arm against the baseline: gain with its interval, and the verdict against a
    margin that was declared beforehand.
    """

    schema_version: int = SCHEMA_VERSION
    pairs: int
    """Number of pairs that were used."""
    dropped_pairs: int
    """Number of warm-up pairs and of pairs whose clocks drifted or throttled."""
    baseline_tokens_per_s: float
    """Median over the baseline's windows."""
    patched_tokens_per_s: float
    """Median over the patched arm's windows."""
    gain_pct: float
    """Geometric mean over pairs of patched / baseline, minus one, in percent. With three or more
    process pairs, each process pair has equal weight."""
    gain_low_pct: float
    """Lower end of the interval of `gain_pct`."""
    gain_high_pct: float
    """Upper end of the interval of `gain_pct`."""
    confidence_pct: float
    """Level of the interval in percent, after correction for interim looks."""
    margin_pct: float
    """Gain in percent that the lower end must exceed to accept."""
    pair_sd_pct: float
    """Standard deviation over pairs of 100 times the log-ratio, without the order effect."""
    verdict: Verdict
    """`accept`, `reject` or `inconclusive`."""
    reason: str
    """Why the verdict is what it is, in one sentence."""
    process_pairs: int = 0
    """Number of process pairs that the samples name; 0 if they name none. With three or more, the
    interval covers differences between processes; with fewer, it holds for these processes only."""
    block_pairs: int = 1
    """Neighbouring pairs averaged before the interval is taken: more than one if neighbours are
    correlated; 0 if the interval comes from process pairs."""
    outlying_pairs: int = 0
    """Number of outlier pairs that were winsorised for the gain and its interval, see
    `patcher.bench.stats.adjust.winsorised`. `pair_sd_pct` uses the unclipped pairs."""
    order_effect_pct: float | None = None
    """Percent by which the arm that runs first is faster; removed from the gain and its interval
    (`adjust.without_order`). None: it could not be estimated, or the record predates the field."""
    p_value: float | None = None
    """p-value of the one-sided test that the gain is above the margin. To accept, it must be below
    half of alpha, where alpha is 100 % minus `confidence_pct`. None in older records."""
    p_holm: float | None = None
    """p-value after Holm's correction over all patches tried, see `compare.holm`; None for a single
    patch."""

    @property
    def figures(self) -> str:
        """The gain with its interval as text: `+1.20 % [+0.80, +1.60]`."""
        return f"{self.gain_pct:+.2f} % [{self.gain_low_pct:+.2f}, {self.gain_high_pct:+.2f}]"
