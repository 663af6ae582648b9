"""Hotspots as ranked bars: their time, what to do about them, and the possible gain."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.report import wording
from patcher.report.lanes import COLOURS, draw_legend, legend_height
from patcher.report.step import short
from patcher.report.svg import Canvas, linear
from patcher.report.views import HotspotRow

_MONO = 6.75
_REACHABLE = (
    "reachable: the gain of a kernel at 80 % of the speed of light; of a chain, that of one kernel "
    "as long as its longest"
)
_NO_KERNEL = ("idle", "memory")


MOST = 16
_LEAST_PCT = 0.05
"""A smaller share gets no bar."""


def bars(rows: Sequence[HotspotRow], width: float) -> Canvas:
    """A bar for each row, as long as its share; the triage is beside it."""
    rows = [row for row in rows[:MOST] if row.length_pct >= _LEAST_PCT] or rows[:1]
    narrow = width < 500
    entries = _entries(rows)
    legend = legend_height(entries, width) if entries else 0.0
    head = 24.0 + legend + (0 if narrow else 20)
    pitch = 43.0 if narrow else 25.0
    foot = 4.0 if narrow or all(row.reachable_pct is None for row in rows) else 28.0
    canvas = Canvas(width, head + max(len(rows), 1) * pitch + foot)
    canvas.text(0, 13, _title(rows, narrow), "t strong")
    draw_legend(canvas, entries, 24, width)
    left, right = (22.0, 120.0) if narrow else (336.0, width - 384)
    longest = max((row.length_pct for row in rows), default=0.0) or 1.0
    x = linear(0, longest, 0, right - left)
    columns = _columns(narrow, width)
    if not narrow:
        for place, word in zip(columns, ("share", "ceiling", "reachable"), strict=True):
            canvas.text(place, head - 8, word, "t", "end")
        canvas.text(columns[-1] + 18, head - 8, "triage", "t")
    for index, row in enumerate(rows):
        top = head + index * pitch
        _name(canvas, row, top + 12, width if narrow else left - 12)
        y = top + (19 if narrow else 2)
        _bar(canvas, row, left, y, max(x(row.length_pct), 1.0))
        figures = (
            wording.percent(row.length_pct, 1),
            wording.ceiling(row.ceiling_pct),
            wording.ceiling(row.reachable_pct),
        )
        for place, figure in zip(columns, figures, strict=False):
            canvas.text(place, y + 10.5, figure, "t strong" if place == columns[0] else "t", "end")
        canvas.text(columns[-1] + (8 if narrow else 18), y + 10.5, row.triage or "", "t strong")
    if foot > 4:
        canvas.text(0, canvas.height - 6, _REACHABLE, "t")
    return canvas


def _columns(narrow: bool, width: float) -> tuple[float, ...]:
    """The right edge of the figures; the triage follows the last one."""
    return (170.0, 238.0) if narrow else (width - 330, width - 236, width - 134)


def _title(rows: Sequence[HotspotRow], narrow: bool) -> str:
    wall = any(row.wall_pct is not None for row in rows)
    if narrow:
        return f"Share of {'wall' if wall else 'kernel'} time; end-to-end ceiling"
    what = "the wall time" if wall else "the kernel time"
    return f"Hotspots by their share of {what}; ceiling: end-to-end gain if it took no time"


def _entries(rows: Sequence[HotspotRow]) -> list[tuple[str, str]]:
    entries: list[tuple[str, str]] = [
        (f"bar {triage}", f"{triage}: {words}" if triage != words else triage)
        for triage, words in wording.TRIAGES.items()
        if any(row.triage == triage and row.kind not in _NO_KERNEL for row in rows)
    ]
    if any(row.kind == "chain" for row in rows):
        entries.append(("bar leave hatched", "fusion chain: its kernels have rows too"))
    if any(row.kind in _NO_KERNEL for row in rows):
        entries.append(("bar nothing", "no kernel"))
    if any(row.sol_pct is not None for row in rows):
        entries.append(("light", "speed of light"))
    return entries


def _name(canvas: Canvas, row: HotspotRow, y: float, end: float) -> None:
    canvas.text(14, y, str(row.rank), "t", "end")
    left = 22.0
    if row.chain is not None:
        canvas.rect(left, y - 9, 10, 10, f"chain c{row.chain % COLOURS}", 2)
        left += 16
    op = f" \N{RIGHTWARDS ARROW} {row.op}" if row.op else ""
    room = int((end - left) / _MONO)
    op = wording.clip(op, max(room - 14, 0))
    name = short(row.name) if row.kind == "kernel" else row.name
    css = "t mono" if row.kind == "kernel" else "t strong"
    canvas.text(left, y, wording.clip(name, max(room - len(op), 8)) + op, css)


def _bar(canvas: Canvas, row: HotspotRow, x: float, y: float, length: float) -> None:
    css = "nothing" if row.kind in _NO_KERNEL else row.triage or ("cand" if row.op else "base")
    canvas.rect(x, y, length, 13, f"bar {css}", 2, wording.clip(row.name, 300))
    if row.kind == "chain":
        canvas.hatch(x, y, length, 13, "hatching")
    if row.sol_pct is not None:
        place = x + length * min(row.sol_pct, 100) / 100
        canvas.rect(place - 1, y - 3, 2, 19, "light")
