"""What a comparison is made of and says: windows, pairs, interval, verdict."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from patcher.bench.records import SCHEMA_VERSION, Record

Arm = Literal["baseline", "patched"]
Verdict = Literal["accept", "reject", "inconclusive"]


class Window(Record):
    """One timed window of decode, both sides of a pair over the same prompts."""

    pair: int
    arm: Arm
    kind: Literal["ab", "aa"]
    """`aa` windows run the baseline on both sides: the control."""
    tokens: int
    """Output tokens counted by the caller, prefill's first token left out."""
    decode_s: float
    prefill_s: float
    sm_clock_mhz: int | None = None
    """Median of the samples taken in it."""
    sm_clock_range_mhz: tuple[int, int] | None = None
    """The lowest and the highest of them."""
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    """The highest."""
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Of any of them."""
    kernel_calls: int | None = None
    """Calls of the patched kernel while this window ran; None where nobody counted."""
    turns_s: tuple[float, ...] = ()
    """Seconds of the timed steps of each turn; none where nobody kept them."""
    process: int | None = Field(default=None, ge=0)
    """See `Sample`."""
    swapped: bool | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s

    def step_s(self, batch: int) -> float:
        """Seconds of one timed decode step of so many sequences."""
        return batch * self.decode_s / self.tokens


class Sample(Record):
    """One line of recorded samples: `{"pair", "arm", "tokens_per_s"}`, and where they are known
    `"process"` and `"swapped"`.
    """

    pair: int = Field(ge=0)
    arm: Arm
    tokens_per_s: float = Field(gt=0, allow_inf_nan=False)
    process: int | None = Field(default=None, ge=0)
    """The process pair that the pair ran in: fresh processes have a number of their own."""
    swapped: bool | None = None
    """Whether the arms changed places in this process pair: the patched process was started first,
    which usually is the baseline's place."""


class Comparison(Record):
    """Patched against baseline: log-ratio per pair, interval of its mean, verdict against a margin
    declared before.
    """

    schema_version: int = SCHEMA_VERSION
    pairs: int
    dropped_pairs: int
    """Warm-up pairs and pairs whose clocks drifted or throttled."""
    baseline_tokens_per_s: float
    """Median over windows."""
    patched_tokens_per_s: float
    gain_pct: float
    """Geometric mean over pairs of patched / baseline, minus one, in percent; with three process
    pairs or more each of them counts once."""
    gain_low_pct: float
    gain_high_pct: float
    confidence_pct: float
    """Level of the interval, after correction for the looks taken."""
    margin_pct: float
    pair_sd_pct: float
    """Standard deviation of the log-ratio of a pair, without the order effect."""
    verdict: Verdict
    reason: str
    process_pairs: int = 0
    """Process pairs that the samples name; 0: they name none. With three or more the interval is
    one over processes, with fewer it is one of these processes alone."""
    block_pairs: int = 1
    """Neighbouring pairs averaged before the interval was taken: more than one where neighbours
    resemble each other; 0: the interval comes from process pairs."""
    outlying_pairs: int = 0
    """Pairs so far from the others that the gain and its interval take them for nearer, see
    `patcher.bench.stats.adjust.winsorised`; `pair_sd_pct` is of all as they are."""
    order_effect_pct: float | None = None
    """By how much the arm that begins a pair is the faster one, taken out of the gain and its
    interval (`adjust.without_order`). None: not told apart, or a record older than that."""
    p_value: float | None = None
    """Of the one-sided test that the gain is above the margin; to accept, it must be below half of
    what `confidence_pct` leaves. None in records older than the field."""
    p_holm: float | None = None
    """The same among all patches tried, see `compare.holm`; None for one alone."""

    @property
    def figures(self) -> str:
        """The gain with its interval, in words."""
        return f"{self.gain_pct:+.2f} % [{self.gain_low_pct:+.2f}, {self.gain_high_pct:+.2f}]"
