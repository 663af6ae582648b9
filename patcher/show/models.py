"""Language models for people: what can be asked, and what a run would take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from patcher.kernel_search.estimate import Estimate, Figure
from patcher.models.ceilings import dollars
from patcher.models.limits import KnownLimits, is_recent
from patcher.models.registry import ListedModel
from patcher.visible import one_line


def models_table(rows: Sequence[ListedModel]) -> Table:
    """What `--model` takes, and whether its key is there."""
    table = Table(title="language models (--model)", title_justify="left")
    for name in ("name", "protocol", "model", "key", "images", "$ per M tokens, in / out"):
        table.add_column(name)
    for row in rows:
        key = f"{row.key_variable}: {'yes' if row.has_key else 'no'}" if row.key_variable else "-"
        price = "unknown"
        if row.input_usd_per_mtok is not None:
            price = f"{row.input_usd_per_mtok:g} / {row.output_usd_per_mtok:g}"
        images = "yes" if row.images else "no"
        table.add_row(*map(Text, (row.name, row.provider, row.model, key, images, price)))
    return table


def limits_table(rows: Sequence[KnownLimits]) -> Table:
    """What servers named in earlier runs."""
    table = Table(title="limits that servers named, in tokens", title_justify="left")
    for name in ("server", "model", "reply", "prompt and reply", "named on"):
        table.add_column(name)
    for row in rows:
        tokens = (
            "-" if value is None else f"{value:,}"
            for value in (row.max_output_tokens, row.context_tokens)
        )
        day = f"{row.named_on}" if is_recent(row) else f"{row.named_on}, no longer kept to"
        server, model = one_line(row.server, 80), one_line(row.model, 80)
        table.add_row(*map(Text, (server, model, *tokens, day)))
    return table


def estimate_lines(found: Estimate) -> list[Table | Text]:
    """Expected, worst and ceiling, and what the figures rest on."""
    table = Table(
        title=f"{found.op} in {found.language}, at most {found.iterations} candidates by "
        f"{found.model}, advice by {found.analyst}; no model was called",
        title_justify="left",
    )
    for name in ("", "expected", "worst case", "ceiling"):
        table.add_column(name, justify="right" if name else "left")
    rows: list[tuple[str, Figure, float | None, Callable[[float], str]]] = [
        ("calls", found.calls, None, "{:,.0f}".format),
        ("tokens", found.tokens, found.ceilings.tokens, "{:,.0f}".format),
        ("money", found.usd, found.ceilings.usd, dollars),
        ("GPU minutes", found.gpu_minutes, found.ceilings.gpu_minutes, "{:,.1f}".format),
        ("minutes", Figure(expected=None, worst=None), found.ceilings.minutes, "{:,.1f}".format),
    ]
    for name, figure, ceiling, shown in rows:
        cells = [
            "unknown" if value is None else shown(value)
            for value in (figure.expected, figure.worst)
        ]
        table.add_row(name, *cells, "none" if ceiling is None else shown(ceiling))
    return [table, *(Text(f"  - {line}") for line in found.assumptions)]
