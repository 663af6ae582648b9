"""The report's charts, each drawn for a given width, so that a phone gets its own layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from patcher.bench import Comparison
from patcher.report import wording
from patcher.report.samples import pair_scale, process_runs, where
from patcher.report.svg import Canvas, Scale, linear, log_ticks, logarithmic, padded, ticks
from patcher.report.views import AttemptRow, PairRow, SweepRow

WIDE, NARROW = 920.0, 360.0
_SANS = 6.3
"""Mean width of a character in the charts' 12 px type."""


def interval_strip(comparison: Comparison, width: float) -> Canvas:
    """The gain's interval on one axis with zero and the margin."""
    canvas = Canvas(width, 86)
    edges = (comparison.gain_low_pct, comparison.gain_high_pct, 0.0, comparison.margin_pct)
    low, high = padded(edges, 0.16)
    x = linear(low, high, 12, width - 12)
    y, floor = 38.0, 62.0
    for tick in ticks(low, high, 8 if width > 500 else 4):
        canvas.line(x(tick), floor, x(tick), floor + 4, "axis")
        canvas.text(x(tick), floor + 18, wording.tick_percent(tick), "t", "middle")
    canvas.line(12, floor, width - 12, floor, "axis")
    canvas.line(x(0), 16, x(0), floor, "zero")
    canvas.line(x(comparison.margin_pct), 16, x(comparison.margin_pct), floor, "margin")
    label = f"margin {wording.signed_percent(comparison.margin_pct)}"
    fits = x(comparison.margin_pct) + len(label) * _SANS < width
    canvas.text(x(comparison.margin_pct), 11, label, "t margin-text", "start" if fits else "end")
    left, right = x(comparison.gain_low_pct), x(comparison.gain_high_pct)
    canvas.rect(left, y - 7, max(right - left, 2), 14, f"interval {comparison.verdict}", 7)
    canvas.dot(x(comparison.gain_pct), y, 6, f"point {comparison.verdict}")
    return canvas


def ab(
    pairs: Sequence[PairRow],
    comparison: Comparison,
    control_pairs: Sequence[PairRow],
    control: Comparison | None,
    width: float,
) -> Canvas:
    """Gain of each pair in the order measured, mean, interval and margin, A/A control beside."""
    narrow = width < 500
    height, left, top, bottom = (260.0 if narrow else 300.0), 58.0, 30.0, 34.0
    values = [row.gain_pct for row in (*pairs, *control_pairs)]
    values += [0.0, comparison.margin_pct, comparison.gain_low_pct, comparison.gain_high_pct]
    if control:
        values += [control.gain_low_pct, control.gain_high_pct]
    low, high = padded(values)
    y = linear(low, high, height - bottom, top)
    canvas = Canvas(width, height)
    for tick in ticks(low, high, 6):
        canvas.line(left, y(tick), width, y(tick), "grid")
        if abs(y(tick) - y(comparison.margin_pct)) > 13:
            canvas.text(left - 8, y(tick) + 4, wording.tick_percent(tick), "t", "end")
    share = 1.0 if control is None else 0.66
    split = left + (width - left) * share
    canvas.line(left, y(0), width, y(0), "zero")
    ends = top - 4, height - bottom
    end = split - (0 if control is None else 14)
    _ab_panel(canvas, pairs, comparison, left, end, y, ends, "cand")
    heading = "A/A control" if narrow else "A/A control: baseline on both sides"
    if control is not None:
        _ab_panel(canvas, control_pairs, control, split + 14, width, y, ends, "base")
        canvas.text(split + 14, 16, heading, "t strong")
        canvas.line(split, 6, split, height - bottom + 4, "axis")
    canvas.text(left, 16, "A/B" if narrow else "A/B: patched against baseline", "t strong")
    canvas.line(left, y(comparison.margin_pct), width, y(comparison.margin_pct), "margin")
    canvas.text(left - 8, y(comparison.margin_pct) + 4, "margin", "t margin-text", "end")
    canvas.text(left, height - 8, "pairs in the order measured", "t")
    return canvas


def _ab_panel(
    canvas: Canvas,
    pairs: Sequence[PairRow],
    found: Comparison,
    left: float,
    right: float,
    y: Scale,
    floor: tuple[float, float],
    css: str,
) -> None:
    top, bottom = y(found.gain_high_pct), y(found.gain_low_pct)
    canvas.rect(left, top, right - left, max(bottom - top, 1.5), f"band {css}")
    canvas.line(left, y(found.gain_pct), right, y(found.gain_pct), f"mean {css}")
    x = pair_scale(len(pairs), left, right)
    for *_, last in process_runs(pairs)[:-1]:  # fresh processes begin behind each line
        edge = (x(last) + x(last + 1)) / 2
        canvas.line(edge, floor[0], edge, floor[1], "process-edge")
    radius = 3.6 if len(pairs) <= 60 else 2.4
    for index, row in enumerate(pairs):
        tip = f"pair {row.pair}: {wording.signed_percent(row.gain_pct)}{where(row)}"
        canvas.dot(x(index), y(row.gain_pct), radius, f"dot {css}", tip)


def sweep_times(rows: Sequence[SweepRow], axis: str, width: float) -> Canvas:
    """Time of one call, candidate, baseline and speed of light, over the sweep."""
    height, left, right, top, bottom = 250.0, 58.0, 12.0, 30.0, 42.0
    canvas = Canvas(width, height)
    light = [row.sol_us or 0.0 for row in rows]
    lit = all(value > 0 for value in light)
    values = [value for row in rows for value in (row.candidate_us, row.baseline_us)]
    values += light if lit else []
    x = linear(0, max(len(rows) - 1, 1), left + 14, width - right - 14)
    if max(values) > 8 * min(values):
        low, high = min(values) / 1.25, max(values) * 1.25
        y, marks = logarithmic(low, high, height - bottom, top), log_ticks(low, high)
        note = "time of one call, logarithmic"
    else:
        low, high = 0.0, max(values) * 1.08
        y, marks = linear(low, high, height - bottom, top), ticks(low, high)
        note = "time of one call"
    for tick in marks:
        canvas.line(left, y(tick), width - right, y(tick), "grid")
        canvas.text(left - 8, y(tick) + 4, wording.tick_microseconds(tick), "t", "end")
    _categories(canvas, [row.label for row in rows], x, height - bottom, axis, width)
    for css, times in (
        ("base", [row.baseline_us for row in rows]),
        ("cand", [row.candidate_us for row in rows]),
    ):
        canvas.path([(x(index), y(value)) for index, value in enumerate(times)], f"series {css}")
        for index, value in enumerate(times):
            tip = f"{axis} {rows[index].label}: {wording.microseconds(value)}"
            canvas.dot(x(index), y(value), 3.6, f"dot solid {css}", tip)
    entries = [("base", "baseline"), ("cand", "candidate")]
    if lit:
        points = [(x(index), y(value)) for index, value in enumerate(light)]
        if len(points) == 1:
            points = [(points[0][0] - 12, points[0][1]), (points[0][0] + 12, points[0][1])]
        canvas.path(points, "series sol")
        entries.append(("sol", "speed of light"))
    legend(canvas, entries, left, 14)
    if width >= 500:
        canvas.text(width - right, 14, note, "t", "end")
    return canvas


def sweep_speedups(rows: Sequence[SweepRow], axis: str, width: float) -> Canvas:
    """Speedup over the baseline with its interval, over the sweep."""
    height, left, right, top, bottom = 230.0, 58.0, 12.0, 26.0, 42.0
    canvas = Canvas(width, height)
    low, high = padded(
        [1.0, *(value for row in rows for value in (row.speedup_low, row.speedup_high))]
    )
    low = max(low, 0.0)
    y = linear(low, high, height - bottom, top)
    x = linear(0, max(len(rows) - 1, 1), left + 14, width - right - 14)
    for tick in ticks(low, high):
        canvas.line(left, y(tick), width - right, y(tick), "grid")
        canvas.text(left - 8, y(tick) + 4, wording.tick_times(tick), "t", "end")
    canvas.line(left, y(1), width - right, y(1), "zero")
    _categories(canvas, [row.label for row in rows], x, height - bottom, axis, width)
    for index, row in enumerate(rows):
        css = "cand" if row.speedup >= 1 else "bad"
        canvas.line(x(index), y(row.speedup_low), x(index), y(row.speedup_high), f"whisker {css}")
        for end in (row.speedup_low, row.speedup_high):
            canvas.line(x(index) - 4, y(end), x(index) + 4, y(end), f"whisker {css}")
        tip = f"{axis} {row.label}: {wording.times(row.speedup)}"
        canvas.dot(x(index), y(row.speedup), 4.2, f"dot solid {css}", tip)
    canvas.text(left, 14, "speedup, 95 % interval", "t strong")
    return canvas


def attempts(rows: Sequence[AttemptRow], width: float) -> Canvas:
    """Speedup by iteration, with the best so far as a step line; failures are crosses below."""
    height, left, right, top, lane = 230.0, 58.0, 12.0, 26.0, 54.0
    canvas = Canvas(width, height)
    floor = height - lane
    speedups = [row.speedup for row in rows if row.speedup is not None]
    low, high = padded([1.0, *speedups])
    low = max(low, 0.0)
    y = linear(low, high, floor - 8, top)
    x = linear(0, max(len(rows) - 1, 1), left + 14, width - right - 14)
    for tick in ticks(low, high, 4):
        canvas.line(left, y(tick), width - right, y(tick), "grid")
        canvas.text(left - 8, y(tick) + 4, wording.tick_times(tick), "t", "end")
    canvas.line(left, y(1), width - right, y(1), "zero")
    canvas.rect(left, floor, width - left - right, 22, "lane", 4)
    canvas.text(left - 8, floor + 15, "failed", "t", "end")
    climb: list[tuple[float, float]] = []
    best = 0.0
    for index, row in enumerate(rows):
        if row.speedup is not None and row.outcome == "correct" and row.speedup > best:
            if climb:
                climb.append((x(index), y(best)))
            best = row.speedup
            climb.append((x(index), y(best)))
    if climb:
        climb.append((x(max(len(rows) - 1, 0)), y(best)))
    canvas.path(climb, "series cand thin")
    for index, row in enumerate(rows):
        tip = f"iteration {row.iteration}: {wording.outcome(row.outcome)}"
        if row.speedup is None:
            canvas.cross(x(index), floor + 11, 4.5, "cross", tip)
        else:
            css = "cand" if row.outcome == "correct" else "bad"
            canvas.dot(
                x(index),
                y(row.speedup),
                4.2,
                f"dot solid {css}",
                f"{tip}, {wording.times(row.speedup)}",
            )
    _categories(canvas, [str(row.iteration) for row in rows], x, floor + 22, "iteration", width)
    canvas.text(
        left, 14, "speedup over the strongest baseline" if width > 500 else "speedup", "t strong"
    )
    return canvas


def _categories(
    canvas: Canvas, labels: Sequence[str], x: Scale, floor: float, axis: str, width: float
) -> None:
    canvas.line(58, floor, width - 12, floor, "axis")
    pitch = min(
        (x(index + 1) - x(index) for index, _ in enumerate(pairwise(labels))), default=width
    )
    widest = max((len(label) for label in labels), default=1) * _SANS + 10
    every = max(1, -(-int(widest) // max(int(pitch), 1)))
    for index, label in enumerate(labels):
        canvas.line(x(index), floor, x(index), floor + 4, "axis")
        if index % every == 0:
            canvas.text(x(index), floor + 17, label, "t", "middle")
    canvas.text((58 + width - 12) / 2, floor + 33, axis, "t", "middle")


def legend(canvas: Canvas, entries: Sequence[tuple[str, str]], x: float, y: float) -> None:
    for css, label in entries:
        canvas.dot(x + 5, y - 4, 4.2, f"dot solid {css}")
        canvas.text(x + 14, y, label, "t")
        x += 14 + len(label) * _SANS + 18
