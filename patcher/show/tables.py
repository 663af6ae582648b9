"""Tables for people: every command prints through here, never twice in two ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from patcher.attempts import Attempt, Optimisation
from patcher.bench import Comparison, Evaluation, KernelCounters, Op, Outcome
from patcher.doctor import Finding
from patcher.report.wording import visible

if TYPE_CHECKING:  # it imports torch
    from patcher.ab.decision import Decision
    from patcher.bench.ab.planted import PlantedGains

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
VERDICT_COLOURS = {"accept": "green", "reject": "red", "inconclusive": "yellow"}


def evaluation_table(evaluation: Evaluation) -> Table:
    """Outcome, and the sweep where it was timed."""
    good = evaluation.outcome is Outcome.CORRECT
    gain = "" if evaluation.geomean_speedup is None else f", {evaluation.geomean_speedup:.3f}x"
    against = f" against {evaluation.baseline}" if evaluation.baseline else ""
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
    for name, detail in evaluation.baselines.items():
        console.print("      baseline", f"{name}:", Text(visible(detail)))
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


def attempts_table(attempts: tuple[Attempt, ...]) -> Table:
    """The loop, iteration by iteration."""
    table = Table(title="candidates tried")
    for name in ("#", "pass", "outcome", "speedup", "detail"):
        table.add_column(name)
    for attempt in attempts:
        speedup = attempt.geomean_speedup
        table.add_row(
            str(attempt.iteration),
            attempt.phase,
            str(attempt.outcome),
            "-" if speedup is None else f"{speedup:.3f}x",
            Text(visible(attempt.detail[:100])),
        )
    return table


def ended_line(optimisation: Optimisation) -> Text:
    """Why the loop ended."""
    words = optimisation.stopped.replace("_", " ")
    detail = f": {optimisation.stopped_detail}" if optimisation.stopped_detail else ""
    return Text(f"{optimisation.strategy} ended by {words}{detail}", style="dim")


def comparison_lines(name: str, comparison: Comparison) -> Text:
    text = Text(f"{name}: ")
    text.append(comparison.verdict, style=f"bold {VERDICT_COLOURS[comparison.verdict]}")
    text.append(
        f"  {comparison.gain_pct:+.2f} % "
        f"[{comparison.gain_low_pct:+.2f}, {comparison.gain_high_pct:+.2f}] at "
        f"{comparison.confidence_pct:.1f} %, margin {comparison.margin_pct:g} %, "
        f"{comparison.pairs} pairs (SD {comparison.pair_sd_pct:.2f} %); "
        f"{comparison.baseline_tokens_per_s:,.1f} -> {comparison.patched_tokens_per_s:,.1f} tok/s"
    )
    if comparison.order_effect_pct is not None:
        text.append(f"; beginning a pair gains {comparison.order_effect_pct:+.2f} %, taken out")
    return text


def planted_lines(gains: PlantedGains) -> list[Text]:
    """What was planted and whether it was found, then the interval it went by."""
    lines = []
    for one in gains.planted:
        line = Text(f"planted {one.planted_pct:+.2f} % ({one.delay_us:.0f} us a step): ")
        line.append(one.found, style="bold green" if one.found == "found" else "bold red")
        if one.found == "not found" and one.pairs_needed is not None:
            line.append(f"; with this spread it takes about {one.pairs_needed:,} pairs")
        line.append("" if one.holds else "; the interval does not hold it")
        lines += [line, comparison_lines("  measured", one.comparison)]
    return lines


def findings_table(findings: list[Finding]) -> Table:
    table = Table(title="patcher doctor")
    for name in ("", "what", "finding", "fix"):
        table.add_column(name)
    for finding in findings:
        table.add_row(
            Text(finding.status, style=COLOURS[finding.status]),
            finding.name,
            Text(finding.detail),
            Text(finding.fix),
        )
    return table


def ops_table(ops: dict[str, Op]) -> Table:
    table = Table(title="kernel library")
    for name in ("op", "operation", "baselines", "solutions", "patch points"):
        table.add_column(name)
    for op in ops.values():
        points = (f"{p.engine} {p.versions}: {p.point}" for p in op.contract.patch_points)
        table.add_row(
            op.name,
            op.contract.operation,
            ", ".join(op.baselines),
            ", ".join(info.name for info, _ in op.solutions()),
            "\n".join(points),
        )
    return table


@contextmanager
def stage_bar(console: Console, quiet: bool) -> Iterator[StageBar]:
    """One live bar that changes its label from stage to stage."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )
    with progress:
        yield StageBar(progress, console, quiet)


class StageBar:
    """Callable with (stage, done, total), as the judge and the A/B report their progress."""

    def __init__(self, progress: Progress, console: Console, quiet: bool) -> None:
        self._progress, self._console, self._quiet = progress, console, quiet
        self._task = progress.add_task("starting", total=None)
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """What stands in brackets after a stage is a note, which may change within it."""
        name = stage.partition(" (")[0]
        if name != self._stage:
            self._stage = name
            self._progress.reset(self._task)
        self._progress.update(self._task, description=stage, completed=done, total=total)

    def say(self, line: str | Text) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(line, highlight=False)


def decision_lines(decision: Decision, label: str = "verdict") -> list[Text]:
    colour = VERDICT_COLOURS[decision.verdict]
    lines = [Text(f"{label}: {decision.verdict}", style=f"bold {colour}")]
    return lines + [Text(f"  - {reason}") for reason in decision.reasons]
