"""A verdict of the judge as tables: its checks, its timings, its counters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patcher.bench import Evaluation, KernelCounters, Outcome
from patcher.visible import visible


def evaluation_table(evaluation: Evaluation) -> Table:
    """Outcome, and the sweep where it was timed."""
    good = evaluation.outcome is Outcome.CORRECT
    gain = "" if evaluation.geomean_speedup is None else f", {evaluation.geomean_speedup:.3f}x"
    against = f" against {evaluation.baseline}" if evaluation.baseline else ""
    if failed := evaluation.failed_baselines:
        against += f", not against {', '.join(failed)}, which failed here"
    if lower := evaluation.lower_grade:
        against += f"; {lower}"
    table = Table(
        title=f"{evaluation.op} ({evaluation.language}): {evaluation.outcome}{gain}{against}",
        title_style="bold green" if good else "bold yellow",
    )
    names = (
        "point",
        "candidate us",
        "baseline us",
        "speedup",
        "95 % interval",
        "of light",
        "of launch floor",
        "cold us",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "point" else "right")
    for timing in evaluation.timings:
        table.add_row(
            " ".join(f"{axis}={size}" for axis, size in timing.axes.items()),
            f"{timing.candidate_us:.2f}",
            f"{timing.baseline_us:.2f}",
            f"{timing.speedup:.3f}x",
            f"{timing.speedup_low:.3f} .. {timing.speedup_high:.3f}",
            "-" if timing.sol_pct is None else f"{timing.sol_pct:.0f} %",
            "-" if timing.launch_pct is None else f"{timing.launch_pct:.0f} %",
            "-" if timing.candidate_cold_us is None else f"{timing.candidate_cold_us:.2f}",
        )
    return table


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    print_checks(console, evaluation)
    console.print(evaluation_table(evaluation))
    console.print(f"sandbox: {evaluation.sandbox}", style="dim", highlight=False)


def print_checks(console: Console, evaluation: Evaluation) -> None:
    """What was looked at, without what was timed."""
    for check in evaluation.checks:
        mark = "[green]ok  [/]" if check.passed else "[red]fail[/]"
        console.print(mark, f"{check.name}:", Text(visible(check.detail)))
    for said in evaluation.tripwires:
        console.print("      source:", Text(visible(said)))
    for name, found in evaluation.baselines.items():
        console.print("      baseline", f"{name}:", Text(visible(str(found))))
    if evaluation.log and not evaluation.timings:
        console.print(Text(visible(evaluation.log[-3000:]), style="dim"))


def counters_table(kernels: Sequence[KernelCounters]) -> Table:
    """A column for each kernel."""
    from patcher.bench.judge.counters import metrics

    table = Table(title="what Nsight Compute counted, caches flushed before each kernel")
    for name in ("", "unit"):
        table.add_column(name)
    for kernel in kernels:
        table.add_column(Text(kernel.kernel[:60]), justify="right", overflow="fold")
    table.add_row("grid x block", "", *(f"{k.grid} x {k.block}" for k in kernels))
    times = (k.duration_us for k in kernels)
    table.add_row("time", "us", *("-" if time is None else f"{time:.2f}" for time in times))
    for metric in metrics():
        found = [kernel.values.get(metric.key) for kernel in kernels]
        unit = next((counter.unit for counter in found if counter), "")
        figures = ["-" if each is None else _figure(each.value) for each in found]
        table.add_row(metric.means, Text(unit), *figures)
    return table


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
