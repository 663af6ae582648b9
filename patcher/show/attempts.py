"""The candidates of an agent loop as a table, and why the loop ended."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from patcher.attempts import Attempt, LoopResult
from patcher.visible import visible


def attempts_table(attempts: tuple[Attempt, ...]) -> Table:
    """The loop, iteration by iteration."""
    table = Table(title="candidates")
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


def ended_line(result: LoopResult) -> Text:
    """Why the loop ended."""
    words = result.stopped.replace("_", " ")
    detail = f": {result.stopped_detail}" if result.stopped_detail else ""
    return Text(f"{result.strategy} stopped by {words}{detail}", style="dim")
