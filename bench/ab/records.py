"""What an end-to-end A/B found: throughput, latency, quality of both arms."""

from __future__ import annotations

import statistics

from pydantic import Field, JsonValue

from patcher.bench.ab.engine_config import Tuning
from patcher.bench.machine.environment import Environment
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Comparison, Window
from patcher.bench.workload import Workload


class LogitError(Record):
    """How far logits are from others over the same tokens."""

    rmse: float
    max_error: float
    """Of one logit."""
    mean_kl: float
    """KL divergence in nats of the others to these, mean over positions."""
    p99_kl: float
    max_kl: float
    """At the worst position."""
    flips: int
    """Positions at which the greedy picks differ."""


class TaskScore(Record):
    """Multiple choice, both arms on the same items; an item's answer is the choice with the highest
    log-likelihood.
    """

    items: int
    chance_pct: float
    baseline_pct: float
    """Share of items answered right."""
    patched_pct: float
    worse: int
    """Items that only the baseline gets right."""
    better: int
    """Items that only the patched model gets right."""
    floor_changed: int
    """Items that two runs of the baseline do not agree on: right in one alone."""
    p_value: float
    """Of the one-sided exact McNemar test that the patched model is worse."""
    difference_low_pct: float
    """95 % interval of patched - baseline in points: paired bootstrap over items."""
    difference_high_pct: float
    detectable_pct: float | None
    """Smallest drop in points that such a test finds with 80 % power; None: none does."""
    margin_shift: float
    """Mean over items of what the patch adds to the log-likelihood of the right choice over that
    of the best wrong one, in nats."""
    passed: bool
    reason: str


class Quality(Record):
    """Is it still the same model? Patched and baseline against the same model in higher
    precision, two runs of the baseline against each other, and a task.
    """

    schema_version: int = SCHEMA_VERSION
    positions: int
    """Teacher-forced positions compared."""
    reference: str
    """How the reference was computed, e.g. `float64 upcast`."""
    baseline_rmse: float
    """Root mean square error of the baseline's logits against the reference."""
    patched_rmse: float
    baseline_max_error: float
    patched_max_error: float
    baseline_mean_kl: float
    """Mean KL divergence (nats) of reference to baseline, over positions."""
    patched_mean_kl: float
    greedy_agreement_pct: float
    """Share of positions at which both arms pick the same token."""
    baseline_reference_agreement_pct: float
    """Share of positions at which the baseline picks what the reference picks: the yardstick."""
    patched_reference_agreement_pct: float
    worst_flip_margin: float | None
    """Largest baseline logit gap among positions where the picks differ; None when none differ."""
    flip_allowance: float
    """Gap that the baseline's own error can explain."""
    baseline_p99_kl: float | None = None
    """99th percentile over positions; None in records older than the field, like all below."""
    patched_p99_kl: float | None = None
    baseline_max_kl: float | None = None
    """At the worst position."""
    patched_max_kl: float | None = None
    floor: LogitError | None = None
    """A/A: a second run of the baseline against its first. All zero: the engine repeats itself."""
    between: LogitError | None = None
    """The patched model against the baseline: to be read beside `floor`."""
    near_tie_flips: int | None = None
    """Of the positions at which the arms pick differently, those whose gap the allowance covers."""
    task: TaskScore | None = None
    task_refusal: str | None = None
    """Why there is no task score."""
    passed: bool
    """On every rung that there is."""
    reason: str


class Latency(Record):
    """What one who waits for tokens sees, in milliseconds."""

    first_token_ms: float
    """Time to first token: prefill of the whole batch, median over windows."""
    per_token_ms: float
    """Time per output token: decode seconds over decode steps, median over windows."""
    steps: int
    """Decode steps that were timed one by one, each waited for, after the pairs."""
    between_ms: dict[str, float]
    """Inter-token latency over those: `p50`, `p90`, `p99`, `max`."""


class Throughput(Record):
    """One whole end-to-end A/B as measured."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    patch: str | None
    """Patch id; None for recorded samples."""
    comparison: Comparison
    control: Comparison | None
    """A/A control in the same session."""
    windows: tuple[Window, ...]
    routing_entropy_pct: float | None
    """Mean entropy of the experts picked, in percent of uniform; a mixture of experts only."""
    clocks: str
    """`locked at N MHz` or `monitored: ...`."""
    environment: Environment
    latency: dict[Arm, Latency] = Field(default_factory=dict)
    peak_memory_bytes: dict[Arm, int] = Field(default_factory=dict)
    """Where each arm has a process of its own: the largest, of the device or of the host."""
    residency: str = ""
    """How two processes shared the device, in words; empty: both arms are one process."""
    engine_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Beside what the workload asks for, of both arms."""
    patched_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Over those, of the patched arm alone: what its patches are for, where the baseline is
    another configuration."""
    tuning: Tuning | None = None
    """How these were found, where they were looked for."""

    def repeat_cv_pct(self, arm: Arm) -> float | None:
        """Coefficient of variation of tokens/s over an arm's process pairs, else its windows.

        The first pair of each is left out, as in the comparison; None with fewer than two repeats.
        """
        runs: dict[int | None, list[Window]] = {}
        for window in self.windows:
            if window.kind == "ab" and window.arm == arm:
                runs.setdefault(window.process, []).append(window)
        kept = [windows[1:] for windows in runs.values() if windows[1:]]
        groups = kept if len(kept) > 1 else [[window] for windows in kept for window in windows]
        rates = [sum(w.tokens for w in g) / sum(w.decode_s for w in g) for g in groups]
        if len(rates) < 2:
            return None
        return 100 * statistics.stdev(rates) / statistics.mean(rates)
