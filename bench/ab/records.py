"""Results of an end-to-end A/B: throughput, latency and quality of both arms."""

from __future__ import annotations

import statistics
from typing import Literal

from pydantic import Field, JsonValue

from patcher.bench.ab.engine_config import Tuning
from patcher.bench.machine.environment import Environment
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Comparison, Window
from patcher.bench.workload import Workload


class LogitError(Record):
    """Errors of logits relative to others over the same tokens."""

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
    """Multiple choice with both arms on the same items. An item's answer is the choice with the
    highest log-likelihood.
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
    """Items on which two runs of the baseline differ: right in one run only."""
    p_value: float
    """p-value of the one-sided exact McNemar test that the patched model is worse."""
    difference_low_pct: float
    """95 % interval of patched - baseline in points: paired bootstrap over items."""
    difference_high_pct: float
    detectable_pct: float | None
    """Smallest drop in points that such a test finds with 80 % power; None: it finds none."""
    margin_shift: float
    """Mean over items of the change in log-likelihood (nats) of the right choice relative to the
    best wrong one."""
    passed: bool
    reason: str


class Quality(Record):
    """Is it still the same model? Patched and baseline against a reference in higher precision, two
    runs of the baseline against each other, and a task.
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
    """Share of positions at which the baseline picks the same token as the reference."""
    patched_reference_agreement_pct: float
    worst_flip_margin: float | None
    """The baseline's logit gap where the picks differ, at the position where it is furthest beyond
    what is allowed, or nearest to it; None when none differ."""
    flip_allowance: float
    """Gap that the errors at that position can explain; the median if no picks differ. Until rule 6
    one number for all positions."""
    baseline_p99_kl: float | None = None
    """99th percentile over positions; None in older records, like all fields below."""
    patched_p99_kl: float | None = None
    baseline_max_kl: float | None = None
    """At the worst position."""
    patched_max_kl: float | None = None
    floor: LogitError | None = None
    """A/A: a second run of the baseline against its first. All zero if the two are equal."""
    between: LogitError | None = None
    """The patched model against the baseline; compare it with `floor`."""
    alone: LogitError | None = None
    """Of the baseline with each sequence by itself, against the reference; None where they are."""
    near_tie_flips: int | None = None
    """Positions with different picks whose gap is within the allowance."""
    near_ties: int | None = None
    """Positions, of all, at which the baseline's two largest logits are within the allowance."""
    prompts: Literal["text", "random tokens"] | None = None
    """What the compared tokens come after."""
    task: TaskScore | None = None
    task_refusal: str | None = None
    """Why there is no task score."""
    passed: bool
    """Whether every test passed."""
    reason: str


class Latency(Record):
    """Latency of requests, in milliseconds."""

    first_token_ms: float
    """Time to first token: prefill of the whole batch, median over windows."""
    per_token_ms: float
    """Time per output token: decode seconds over decode steps, median over windows."""
    steps: int
    """Number of decode steps timed one by one, with a wait after each, after the pairs."""
    between_ms: dict[str, float]
    """Inter-token latency of those steps: `p50`, `p90`, `p99`, `max`."""


class Throughput(Record):
    """The result of one end-to-end A/B."""

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
    """With a process per arm: largest peak memory in bytes, of the device or of the host."""
    residency: str = ""
    """How two processes shared the device, in words; empty: both arms are one process."""
    engine_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of both arms besides those of the workload."""
    patched_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the patched arm alone, which its patches need and the baseline's
    configuration lacks."""
    tuning: Tuning | None = None
    """The search for these arguments, if there was one."""

    def repeat_cv_pct(self, arm: Arm) -> float | None:
        """Coefficient of variation of tokens/s over an arm's process pairs, else its windows.

        Leaves out the first pair of each, as the comparison does. None with fewer than two repeats.
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
