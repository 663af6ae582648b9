"""Charts of a training: reward, shares and loss over updates, and shares of evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from patcher.bench.stats.intervals import half_width
from patcher.bench.stats.shares import ShareInterval, wilson
from patcher.report.charts import legend
from patcher.report.svg import Canvas, Scale, linear, padded, ticks

WINDOW = 10
"""Updates in a moving mean; its band is Student's 95 % interval over their values."""
_LEFT, _RIGHT, _TOP, _FLOOR = 58.0, 12.0, 30.0, 42.0


class Curve(NamedTuple):
    """One quantity over updates."""

    name: str
    css: str
    """Class of its colour."""
    values: Sequence[float]


class MovingMean(NamedTuple):
    """Of the last `WINDOW` values."""

    mean: float
    low: float
    high: float


def moving_means(values: Sequence[float], shares: bool = False) -> list[MovingMean]:
    """The mean of each value and those before it, with its interval; one value alone has none.

    Args:
        values: in the order of updates.
        shares: whether they are; then equal ones have Wilson's interval, as many as there are.
    """
    found = []
    for end in range(1, len(values) + 1):
        part = values[max(end - WINDOW, 0) : end]
        mean, half = fmean(part), half_width(part)
        if shares and len(set(part)) == 1:
            found.append(MovingMean(mean, *wilson(mean, len(part))))
            continue
        half = 0.0 if math.isinf(half) else half
        found.append(MovingMean(mean, mean - half, mean + half))
    return found


def over_updates(
    title: str,
    updates: Sequence[int],
    curves: Sequence[Curve],
    width: float,
    label: Callable[[float], str],
    bounds: tuple[float, float] | None = None,
) -> Canvas:
    """Each update as a dot, the moving mean as a line, its interval as a band.

    Args:
        title: of the panel.
        updates: their numbers, as many as each curve has values.
        curves: drawn in this order.
        width: in pixels.
        label: of a tick.
        bounds: of shares, which intervals are cut off at; None: those of the values.
    """
    canvas = Canvas(width, 230)
    means = [moving_means(curve.values, bounds is not None) for curve in curves]
    # the first few values have wide intervals, which would hide the rest
    shown = [value for curve in curves for value in curve.values]
    low, high = bounds or padded(shown)
    y = linear(low, high, canvas.height - _FLOOR, _TOP)
    x = linear(updates[0], max(updates[-1], updates[0] + 1), _LEFT + 14, width - _RIGHT - 14)
    for tick in ticks(low, high, 5):
        canvas.line(_LEFT, y(tick), width - _RIGHT, y(tick), "grid")
        canvas.text(_LEFT - 8, y(tick) + 4, label(tick), "t", "end")
    _axis(canvas, updates, x, width)
    for curve, mean in zip(curves, means, strict=True):
        points = list(zip(updates, mean, strict=True))
        upper = [(x(at), y(min(each.high, high))) for at, each in points]
        lower = [(x(at), y(max(each.low, low))) for at, each in reversed(points)]
        canvas.area(upper + lower, f"band {curve.css}")
    for curve, mean in zip(curves, means, strict=True):
        for at, value in zip(updates, curve.values, strict=True):
            canvas.dot(x(at), y(value), 1.8, f"dot {curve.css}", f"{at}: {label(value)}")
        line = [(x(at), y(each.mean)) for at, each in zip(updates, mean, strict=True)]
        canvas.path(line, f"series {curve.css}")
    canvas.text(_LEFT, 14, title, "t strong")
    if len(curves) > 1:
        legend(canvas, [(each.css, each.name) for each in curves], _LEFT + 18 + 7 * len(title), 14)
    return canvas


def share_intervals(
    evaluations: Sequence[tuple[str, dict[str, ShareInterval]]], width: float
) -> Canvas:
    """A row for each share, with a whisker for each evaluation: the first grey, the last blue.

    Args:
        evaluations: name and shares of each.
        width: in pixels.
    """
    names = list(dict.fromkeys(name for _, shares in evaluations for name in shares))
    pitch = 14 * len(evaluations) + 12
    canvas = Canvas(width, _TOP + pitch * len(names) + 24)
    x = linear(0, 1, _LEFT + 40, width - _RIGHT - 14)
    floor = canvas.height - 22
    for tick in ticks(0, 1, 5):
        canvas.line(x(tick), _TOP - 6, x(tick), floor, "grid")
        canvas.text(x(tick), floor + 16, f"{tick:.0%}", "t", "middle")
    shades = ["base", *["sol"] * (len(evaluations) - 2), "cand"][-len(evaluations) :]
    for row, name in enumerate(names):
        top = _TOP + row * pitch
        canvas.text(_LEFT + 30, top + pitch / 2, name.replace("_", " "), "t", "end")
        for at, (label, shares) in enumerate(evaluations):
            if name in shares:
                found, line = shares[name], top + 7 + 14 * at
                canvas.line(x(found.low), line, x(found.high), line, f"whisker {shades[at]}")
                canvas.dot(
                    x(found.value), line, 4.2, f"dot solid {shades[at]}", f"{label}: {found}"
                )
    marks = [(shade, label) for shade, (label, _) in zip(shades, evaluations, strict=True)]
    legend(canvas, marks, _LEFT, 14)
    return canvas


def _axis(canvas: Canvas, updates: Sequence[int], x: Scale, width: float) -> None:
    floor = canvas.height - _FLOOR
    canvas.line(_LEFT, floor, width - _RIGHT, floor, "axis")
    for tick in ticks(updates[0], max(updates[-1], updates[0] + 1), 8 if width > 500 else 4):
        if tick == int(tick):
            canvas.line(x(tick), floor, x(tick), floor + 4, "axis")
            canvas.text(x(tick), floor + 17, f"{tick:.0f}", "t", "middle")
    canvas.text((_LEFT + width - _RIGHT) / 2, floor + 33, "update", "t", "middle")
