"""What is seen while a run works: a table of its candidates that changes in place on a terminal,
and plain lines elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from patcher.attempts import Attempt, Stage
from patcher.attempts import Progress as LoopProgress
from patcher.bench import Outcome
from patcher.models import Usage
from patcher.models.ceilings import dollars
from patcher.show.progress import StageBar
from patcher.status import best_of
from patcher.visible import visible

DOING: dict[Stage, str] = {
    "analyse": "analysing",
    "diagnose": "diagnosing",
    "generate": "asking",
    "evaluate": "judging",
    "done": "done",
}
_MARGIN = 12
"""Lines of a terminal that are not the table's rows."""


class Rows:
    """The candidates so far, as the loop tells of them."""

    def __init__(self) -> None:
        self.latest: dict[tuple[str, int], LoopProgress] = {}

    def hear(self, progress: LoopProgress) -> None:
        self.latest[progress.op, progress.iteration] = progress

    @property
    def attempts(self) -> list[Attempt]:
        return [row.attempt for row in self.latest.values() if row.attempt]

    @property
    def best(self) -> Attempt | None:
        return best_of(self.attempts)

    @property
    def spent(self) -> Usage:
        return sum((attempt.usage for attempt in self.attempts), Usage())


class Watch:
    """Hears of stages and of the loop's candidates, and shows them. A context manager."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self.rows = Rows()
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._stages = StageBar(self._bar, console, quiet)
        self._live: Live | None = None
        if not quiet and console.is_terminal:
            self._live = Live(
                get_renderable=self._shown, console=console, refresh_per_second=4, transient=True
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._stages(visible(stage), done, total)

    def say(self, line: str | Text) -> None:
        """A line that stays."""
        self._stages.say(Text(visible(line)) if isinstance(line, str) else line)

    def hear(self, progress: LoopProgress) -> None:
        """Of one candidate: a row, or a line when it is done."""
        self.rows.hear(progress)
        if not self._live and progress.stage in ("generate", "done"):
            self.say(self._line(progress))

    def _line(self, progress: LoopProgress) -> str:
        attempt, count = progress.attempt, f"{progress.iteration + 1} of {progress.iterations}"
        if attempt is None:
            return f"  candidate {progress.iteration} ({count}, {progress.phase}): asking"
        best = self.rows.best
        so_far = f"; best {_speedup(best)}" if best else ""
        money = _money(self.rows.spent)
        if progress.ledger:
            money = progress.ledger.sentence() or money
        return (
            f"  candidate {attempt.iteration} ({attempt.phase}): {attempt.outcome}, "
            f"{attempt.detail}{so_far}{'; so far ' + money if money else ''}"
        )

    def _shown(self) -> RenderableType:
        return Group(self._table(), self._bar) if self.rows.latest else self._bar

    def _table(self) -> Table:
        rows = self.rows
        table = Table(title=_title(rows), title_justify="left")
        for name in ("#", "round", "pass", "outcome", "speedup", "cost so far", "detail"):
            right = name in ("#", "round", "speedup", "cost so far")
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "detail")
        shown = max(self._console.height - _MARGIN, 4)
        best, total = rows.best, Usage()
        lines: list[tuple[RenderableType, ...]] = []
        for (_, iteration), row in rows.latest.items():
            attempt = row.attempt
            if attempt is None:
                doing = Spinner("dots", DOING[row.stage])
                lines.append((str(iteration), "", row.phase, doing, "", "", ""))
                continue
            total += attempt.usage
            star = " *" if attempt is best else ""
            good = attempt.outcome is Outcome.CORRECT
            said = Text(str(attempt.outcome).replace("_", " "), style="green" if good else "")
            lines.append(
                (
                    *(str(iteration), str(attempt.round), attempt.phase, said),
                    *(_speedup(attempt) + star, _money(total)),
                    Text(visible(attempt.detail.partition("\n")[0][:80]), style="dim"),
                )
            )
        for line in lines[-shown:]:
            table.add_row(*line)
        return table


def _title(rows: Rows) -> str:
    last = next(reversed(rows.latest.values()))
    best = f", best {_speedup(rows.best)} (*)" if rows.best else ""
    return f"{last.op}: {len(rows.attempts)} of {last.iterations} candidates{best}"


def _speedup(attempt: Attempt | None) -> str:
    speedup = attempt.geomean_speedup if attempt else None
    return "-" if speedup is None else f"{speedup:.3f}x"


def _money(usage: Usage) -> str:
    """What was paid, or else what was written."""
    if usage.cost_usd is not None:
        return dollars(usage.cost_usd)
    tokens = usage.output_tokens
    return "" if tokens is None else f"{tokens:,} tokens"
