"""How memory is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from patcher.memory import PROMOTED, Gain, MemoryRule


def memory_lines(
    folder: Path, rules: Sequence[MemoryRule], techniques: Sequence[Gain]
) -> Iterator[Any]:
    if not rules and not techniques:
        yield Text(f"memory is empty: {folder}")
        return
    if rules:
        table = Table(title=f"rules (sent to models from {PROMOTED} candidates on)")
        for name in ("id", "rule", "language", "op families"):
            table.add_column(name, overflow="fold")
        for name in ("candidates", "runs", "sent"):
            table.add_column(name, justify="right")
        for rule in sorted(rules, key=lambda rule: -rule.count):
            told = "muted" if rule.muted else "yes" if rule.promoted else "no"
            families = ", ".join(rule.families) or "any"
            told_of = (rule.id, rule.text, rule.language or "any", families)
            counts = (str(rule.count), str(rule.runs), told)
            table.add_row(*(escape(str(cell)) for cell in told_of), *counts)
        yield table
    if techniques:
        table = Table(title="techniques (gain: time before the change / time after it)")
        for name in ("id", "technique", "op family", "bytes of a call", "device", "language"):
            table.add_column(name, overflow="fold")
        for name in ("gain", "spread", "right", "broken"):
            table.add_column(name, justify="right")
        for gain in sorted(techniques, key=lambda gain: (gain.family, -gain.gain)):
            text = gain.text + (" (muted)" if gain.muted else "")
            cells = (gain.id, text, gain.family, gain.shapes, gain.device, gain.language or "any")
            worth = (f"{gain.gain:.3f}", f"{gain.spread_pct:.1f} %") if gain.count else ("-", "-")
            outcomes = (str(gain.count), str(gain.failed))
            table.add_row(*(escape(str(cell)) for cell in cells), *worth, *outcomes)
        yield table
    yield Text(f"files: {folder}", style="dim")
