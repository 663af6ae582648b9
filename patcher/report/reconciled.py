"""The reconciliation as bars: expected savings of a step, row by row, and the measured one."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.reconciling.reconcile import Reconciliation
from patcher.report import wording
from patcher.report.step import short
from patcher.report.svg import Canvas, linear, padded, ticks

MOST_ROWS = 10


@dataclass(frozen=True)
class Bar:
    label: str
    saved_us: float
    low_us: float | None
    high_us: float | None
    css: str


def bars_of(found: Reconciliation) -> list[Bar]:
    """Counted rows, with the smaller ones combined; their sum; the measured saving."""
    counted = [row for row in found.rows if row.counted and row.saved_us is not None]
    shown, rest = counted[:MOST_ROWS], counted[MOST_ROWS:]
    bars = [
        Bar(
            f"{short(row.name)} {row.shape}".strip(),
            row.saved_us or 0.0,
            row.low_us,
            row.high_us,
            "cand" if row.kind == "kernel" else "base",
        )
        for row in shown
    ]
    if rest:
        spent = sum(row.saved_us or 0.0 for row in rest)
        bars.append(Bar(f"{len(rest)} more rows of the profile", spent, None, None, "base"))
    if found.expected_us is not None:
        ends = found.expected_low_us, found.expected_high_us
        bars.append(Bar("expected: their sum", found.expected_us, *ends, "cand"))
    ends = found.measured_low_us, found.measured_high_us
    return [*bars, Bar("measured end to end", found.measured_us, *ends, "total")]


def reconciled(found: Reconciliation, width: float) -> Canvas:
    """Saved time of one decode step; to the left of zero is time lost."""
    narrow = width < 500
    bars = bars_of(found)
    left, right, head = (8.0 if narrow else 300.0), width - 74, 26.0
    pitch, drop = (40.0, 16.0) if narrow else (26.0, 0.0)
    floor = head + pitch * len(bars) + 4
    canvas = Canvas(width, floor + 36)
    values = [0.0]
    for bar in bars:
        values += [value for value in (bar.saved_us, bar.low_us, bar.high_us) if value is not None]
    low, high = padded(values, 0.04)
    x = linear(low, high, left, right)
    canvas.text(0, 13, "Saved in one decode step", "t strong")
    for tick in ticks(low, high, 4 if narrow else 7):
        canvas.line(x(tick), head, x(tick), floor, "grid")
        canvas.text(x(tick), floor + 17, wording.tick_microseconds(tick), "t", "middle")
    for index, bar in enumerate(bars):
        top = head + index * pitch
        y = top + drop
        room = int((width if narrow else left - 12) / 6.9)
        total = bar.label in (bars[-1].label, "expected: their sum")
        canvas.text(0, top + 13, wording.clip(bar.label, room), "t strong" if total else "t")
        start, end = sorted((x(0), x(bar.saved_us)))
        if narrow:  # the line would run through the labels
            canvas.line(x(0), y + 1, x(0), y + 18, "zero")
        canvas.rect(start, y + 3, max(end - start, 1), 13, f"bar {bar.css}", 2, bar.label)
        if bar.low_us is not None and bar.high_us is not None:
            canvas.line(x(bar.low_us), y + 9.5, x(bar.high_us), y + 9.5, "whisker ends")
            for edge in (bar.low_us, bar.high_us):
                canvas.line(x(edge), y + 5, x(edge), y + 14, "whisker ends")
        canvas.text(width, y + 13, wording.microseconds(bar.saved_us), "t strong", "end")
    if not narrow:
        canvas.line(x(0), head, x(0), floor, "zero")
    return canvas
