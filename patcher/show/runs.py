"""Runs and what they cost, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from patcher.models.ceilings import Amount, CostLedger, dollars
from patcher.status import Status


def runs_table(found: Sequence[Status]) -> Table:
    """A row for each run; the last one has the sums."""
    table = Table(title="runs")
    for name in ("run", "state", "candidates", "best", *CostLedger().columns()):
        text = name in ("run", "state")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    totals = {name: Amount() for name in CostLedger().columns()}
    for one in found:
        best = "-" if one.best_speedup is None else f"{one.best_speedup:.3f}x"
        columns = one.ledger.columns()
        money = [_money(each) for each in columns.values()]
        table.add_row(one.run, one.state, str(one.candidates), best, *money)
        totals = {name: totals[name] + each for name, each in columns.items()}
    if len(found) > 1:
        table.add_section()
        table.add_row("all", "", "", "", *(_money(each) for each in totals.values()))
    return table


def cost_table(ledger: CostLedger) -> Table:
    """The three columns of a run's ledger."""
    table = Table(title="cost", title_justify="left")
    for name in ("", *ledger.columns()):
        table.add_column(name, justify="right" if name else "left")
    columns = ledger.columns().values()
    table.add_row("dollars", *(f"${each.usd:.4f}" for each in columns))
    table.add_row("tokens", *(f"{each.tokens:,}" for each in columns))
    table.add_row("seconds", *(f"{each.wall_s:,.1f}" for each in columns))
    return table


def cost_line(ledger: CostLedger) -> Text:
    """What lies behind the figures."""
    return Text(ledger.details(), style="dim")


def _money(amount: Amount) -> str:
    """Dollars, or tokens where nothing was paid."""
    if amount.usd or not amount.tokens:
        return dollars(amount.usd)
    return f"{amount.tokens:,} tokens"
