"""What `patcher throughput` says of a measurement, for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from patcher.ab.best_set import BestSet
from patcher.ab.other_workloads import OtherWorkloads
from patcher.ab.result import ABResult
from patcher.bench import Throughput
from patcher.bench.ab.engine_config import ConfigTrial, Tuning, words
from patcher.bench.stats.comparison import Arm
from patcher.show.comparison import comparison_lines, decision_lines
from patcher.show.quality import clock_lines, quality_lines

ARMS: tuple[Arm, Arm] = ("baseline", "patched")


def result_lines(result: ABResult) -> list[Any]:
    """What was measured of patches that were in together, and the verdict."""
    measured = result.measured[0]
    lines: list[Any] = [*throughput_lines(measured.throughput), *quality_lines(measured.quality)]
    if measured.other_workloads is not None:
        lines += other_workload_lines(measured.other_workloads)
    for name, one in zip(result.patches, result.measured, strict=True):
        whose = f" of {name}" if len(result.patches) > 1 else ""
        calls = f"{one.receipt.total_calls:,} calls of the patched kernel"
        lines.append(Text(f"receipt{whose}: {calls}"))
    if result.took_s:
        spent = ", ".join(f"{kind} {seconds:.0f}" for kind, seconds in result.took_s.items())
        lines.append(Text(f"took {sum(result.took_s.values()):.0f} s: {spent}"))
    return [*lines, *decision_lines(result.decision)]


def throughput_lines(found: Throughput) -> list[Text | Table]:
    """Verdict, control, latency and memory by arm, and what it was measured on."""
    shown: list[Text | Table] = [comparison_lines("patch", found.comparison)]
    if found.control is not None:
        shown.append(comparison_lines("A/A control", found.control))
    if found.latency:
        shown.append(_arms_table(found))
    if found.tuning is not None:
        shown += tuning_lines(found.tuning)
    elif found.engine_arguments:
        shown.append(Text(f"engine: {words(found.engine_arguments)}"))
    if found.patched_arguments:
        shown.append(Text(f"engine of the patched arm: {words(found.patched_arguments)}"))
    if found.residency:
        count = found.comparison.process_pairs
        shown.append(Text(f"{count} process pairs: {found.residency}"))
    if found.routing_entropy_pct is not None:
        entropy = f"{found.routing_entropy_pct:.1f} % of uniform"
        shown.append(Text(f"routing entropy: {entropy}, weights: {found.workload.weights}"))
    return [*shown, *clock_lines(found)]


def _arms_table(found: Throughput) -> Table:
    table = Table(title="by arm")
    names = ("", "tok/s", "CV of repeats", "first token ms", "per token ms")
    for name in (*names, "between p50", "p90", "p99", "max", "peak memory GiB"):
        table.add_column(name, justify="right" if name else "left")
    rates = (found.comparison.baseline_tokens_per_s, found.comparison.patched_tokens_per_s)
    for arm, rate in zip(ARMS, rates, strict=True):
        latency, cv = found.latency[arm], found.repeat_cv_pct(arm)
        peak = found.peak_memory_bytes.get(arm)
        table.add_row(
            arm,
            f"{rate:,.1f}",
            "-" if cv is None else f"{cv:.2f} %",
            f"{latency.first_token_ms:.2f}",
            f"{latency.per_token_ms:.3f}",
            *(f"{latency.between_ms[name]:.3f}" for name in ("p50", "p90", "p99", "max")),
            "-" if peak is None else f"{peak / 2**30:.2f}",
        )
    return table


def other_workload_lines(found: OtherWorkloads) -> list[Text | Table]:
    """Each other point with its tokens/s and interval, and what that means."""
    shown: list[Text | Table] = []
    if found.points:
        table = Table(title="other workloads")
        for name in ("batch", "context", "baseline tok/s", "patched", "gain %", "result"):
            table.add_column(name, justify="right")
        for point in found.points:
            one = point.comparison
            table.add_row(
                str(point.batch),
                f"{point.context:,}",
                f"{one.baseline_tokens_per_s:,.1f}",
                f"{one.patched_tokens_per_s:,.1f}",
                f"{one.gain_pct:+.2f} [{one.gain_low_pct:+.2f}, {one.gain_high_pct:+.2f}]",
                found.standing(point),
            )
        shown.append(table)
    words = found.failures + found.unknown or [found.said]
    return shown + [Text(f"other workloads: {word}") for word in words]


def best_set_lines(found: BestSet) -> list[Text | Table]:
    """Every combination with its word among all of them, and the one to keep."""
    table = Table(title="combinations")
    for name in ("patches", "gain %", "verdict among all", "reason"):
        table.add_column(name, justify="right" if name == "gain %" else "left")
    for combination in found.combinations:
        one = combination.comparison
        gain = f"{one.gain_pct:+.2f} [{one.gain_low_pct:+.2f}, {one.gain_high_pct:+.2f}]"
        table.add_row(" + ".join(combination.patches), gain, one.verdict, one.reason)
    lines: list[Text | Table] = [table, Text(found.reason, style="bold")]
    return lines + [Text(f"not measured: {what}", style="yellow") for what in found.missing]


def tuning_lines(tuning: Tuning) -> list[Text]:
    """Each stock configuration tried, what was not tried, and the one that is the baseline."""
    lines = [trial_line(trial) for trial in tuning.trials]
    lines += [Text(f"not tried: {one.name}: {one.reason}", style="dim") for one in tuning.refused]
    return [*lines, Text(f"baseline: {words(tuning.chosen)}")]


def trial_line(trial: ConfigTrial) -> Text:
    said = trial.failure
    if trial.tokens_per_s is not None:
        said = f"{trial.tokens_per_s:,.1f} tok/s, windows within {trial.spread_pct:.2f} %"
        for one in trial.other_workloads:
            where = f"batch {one.batch} and context {one.context:,}"
            said += f"; {one.tokens_per_s:,.1f} at {where}"
    return Text(f"tried {words(trial.arguments)}: {said}", style="dim")
