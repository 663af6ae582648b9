"""Micro gain times calls against the measured gain: a gain that nothing explains is suspicious."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.report.record import Report
from patcher.report.views import sweep_groups


@dataclass(frozen=True)
class Reconciliation:
    """Saved time of one decode step: from the micro-benchmark, and as measured end to end."""

    saved_per_call_us: float
    calls_per_step: float
    predicted_us: float
    measured_us: float
    measured_low_us: float
    measured_high_us: float
    step_us: float
    baseline: str

    @property
    def explained(self) -> bool:
        """Whether the prediction lies inside the measured interval."""
        return self.measured_low_us <= self.predicted_us <= self.measured_high_us


def reconcile(report: Report) -> Reconciliation | str:
    """Whether micro gain times calls explains the measured gain, or why it cannot be told."""
    if report.best is None or report.throughput is None or not report.best.timings:
        return "Needs both a judged candidate and an end-to-end comparison."
    if report.calls_per_step is None:
        return "The calls of the op in one decode step were not recorded."
    batch = report.throughput.workload.batch
    points = [
        row
        for group in sweep_groups(report.best.timings)
        for row in group.rows
        if row.label == str(batch)
    ]
    if not points:
        return f"The sweep has no point at {batch}, the batch of the workload."
    point, found = points[0], report.throughput.comparison
    # tokens of one step over tokens per second
    step_us = batch / found.baseline_tokens_per_s * 1e6
    saved = point.baseline_us - point.candidate_us

    def measured(gain_pct: float) -> float:
        return step_us * (1 - 1 / (1 + gain_pct / 100))

    return Reconciliation(
        saved_per_call_us=saved,
        calls_per_step=report.calls_per_step,
        predicted_us=saved * report.calls_per_step,
        measured_us=measured(found.gain_pct),
        measured_low_us=measured(found.gain_low_pct),
        measured_high_us=measured(found.gain_high_pct),
        step_us=step_us,
        baseline=report.best.baseline or "the strongest baseline",
    )
