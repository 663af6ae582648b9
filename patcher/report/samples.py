"""Every window of the A/B: both arms, process pair by process pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from patcher.report import wording
from patcher.report.svg import Canvas, Scale, linear, padded, ticks
from patcher.report.views import PairRow

_SANS = 6.6


def samples(rows: Sequence[PairRow], width: float) -> Canvas:
    """Tokens per second of both windows of each pair, joined; processes are bands."""
    narrow = width < 500
    height, left, right, top, bottom = (260.0 if narrow else 280.0), 58.0, 8.0, 46.0, 34.0
    canvas = Canvas(width, height)
    low, high = padded([value for row in rows for value in (row.baseline, row.patched)])
    y = linear(low, high, height - bottom, top)
    x = pair_scale(len(rows), left, width - right)
    process_bands(canvas, rows, x, left, width - right, top - 22, height - bottom)
    for tick in ticks(low, high, 5):
        canvas.line(left, y(tick), width - right, y(tick), "grid")
        canvas.text(left - 8, y(tick) + 4, wording.number(tick, 4), "t", "end")
    radius = 3.2 if len(rows) <= 60 else 2.2
    for index, row in enumerate(rows):
        canvas.line(x(index), y(row.baseline), x(index), y(row.patched), "joined")
        for css, word, value in (
            ("base", "baseline", row.baseline),
            ("cand", "patched", row.patched),
        ):
            tip = f"pair {row.pair}, {word}: {wording.number(value, 5)} tok/s{where(row)}"
            canvas.dot(x(index), y(value), radius, f"dot solid {css}", tip)
    place = left
    for css, label in (("base", "baseline"), ("cand", "patched")):
        canvas.dot(place + 5, 10, 4.2, f"dot solid {css}")
        canvas.text(place + 14, 14, label, "t")
        place += 14 + len(label) * _SANS + 18
    if not narrow:
        canvas.text(width - right, 14, "tokens per second", "t", "end")
    canvas.text(left, height - 8, "pairs in the order measured", "t")
    return canvas


def pair_scale(count: int, left: float, right: float) -> Scale:
    """Positions of the pairs; a single one is at the left."""
    return linear(0, max(count - 1, 1), left + 8, right - 8)


def process_runs(rows: Sequence[PairRow]) -> list[tuple[int | None, bool | None, int, int]]:
    """(process pair, swapped, first row, last row) of neighbours that ran in the same processes."""
    found, start = [], 0
    for (process, swapped), group in groupby(rows, key=lambda row: (row.process, row.swapped)):
        count = len(list(group))
        found.append((process, swapped, start, start + count - 1))
        start += count
    return found


def process_bands(
    canvas: Canvas,
    rows: Sequence[PairRow],
    x: Scale,
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> None:
    """A band for every other process pair, each with its number; none without process numbers."""
    runs = process_runs(rows)
    if all(process is None for process, *_ in runs):
        return
    edges = [left, *((x(last) + x(last + 1)) / 2 for *_, last in runs[:-1]), right]
    for index, (process, swapped, _, _) in enumerate(runs):
        start, end = edges[index], edges[index + 1]
        if index % 2 == 0:
            canvas.rect(start, top, end - start, bottom - top, "process")
        else:
            canvas.line(start, top, start, bottom, "axis")
            canvas.line(end, top, end, bottom, "axis")
        number = "?" if process is None else str(process + 1)
        turned = ", arms swapped" if swapped else ""
        for label in (f"process pair {number}{turned}", f"{number}{' swapped' if swapped else ''}"):
            if len(label) * _SANS + 8 <= end - start:
                canvas.text(start + 4, top + 13, label, "t")
                break
        else:
            canvas.text(start + 2, top + 13, number + ("*" if swapped else ""), "t")


def where(row: PairRow) -> str:
    """The processes that a pair ran in, for its tooltip."""
    if row.process is None:
        return ""
    return f", process pair {row.process + 1}{', arms swapped' if row.swapped else ''}"
