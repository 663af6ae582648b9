"""A small SVG canvas: scales, ticks, marks. Colours come from the page's style sheet by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from patcher.visible import visible

Scale = Callable[[float], float]


class Canvas:
    """Marks in user units; one unit is one pixel at the chart's natural width."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._marks: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._marks.append(
            f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        radius: float = 0,
        tip: str = "",
    ) -> None:
        round_by = f' rx="{radius:g}"' if radius else ""
        mark = (
            f'<rect class="{css}" x="{_fine(x)}" y="{_fine(y)}" width="{_fine(max(width, 0))}" '
            f'height="{_fine(max(height, 0))}"{round_by}'
        )
        self._marks.append(f"{mark}>{_tip(tip)}</rect>" if tip else f"{mark}/>")

    def hatch(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """Diagonal strokes inside a rectangle; a pattern would need an id of its own."""
        strokes, offset = [], 6.0 - height
        while offset < width:
            left, right = max(offset, 0.0), min(offset + height, width)
            low, high = y + height - (left - offset), y + height - (right - offset)
            strokes.append(f"M{_fine(x + left)} {_fine(low)}L{_fine(x + right)} {_fine(high)}")
            offset += 6.0
        if strokes:
            self._marks.append(f'<path class="{css}" d="{"".join(strokes)}"/>')

    def area(self, points: Sequence[tuple[float, float]], css: str) -> None:
        steps = "L".join(f"{_fine(x)} {_fine(y)}" for x, y in points)
        self._marks.append(f'<path class="{css}" d="M{steps}Z"/>')

    def place(self, other: Canvas, x: float, y: float) -> None:
        """Another drawing, moved."""
        inner = "".join(other._marks)
        self._marks.append(f'<g transform="translate({_fine(x)} {_fine(y)})">{inner}</g>')

    def dot(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        self._marks.append(
            f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_tip(tip)}</circle>'
        )

    def cross(self, x: float, y: float, arm: float, css: str, tip: str = "") -> None:
        side = 2 * arm
        path = f"M{x - arm:.1f} {y - arm:.1f}l{side:g} {side:g}m0 {-side:g}l{-side:g} {side:g}"
        self._marks.append(f'<path class="{css}" d="{path}">{_tip(tip)}</path>')

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        if points:
            steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self._marks.append(f'<path class="{css}" d="M{steps}"/>')

    def text(self, x: float, y: float, text: str, css: str = "t", anchor: str = "start") -> None:
        self._marks.append(
            f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(visible(text))}</text>"
        )

    def render(self, name: str, title: str, description: str, css: str) -> str:
        """The drawing as one `<svg role="img">`; `name` makes its ids unique in the page."""
        return (
            f'<svg class="chart {css}" role="img" aria-labelledby="{name}-t {name}-d" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" style="max-width:{self.width:g}px">'
            f'<title id="{name}-t">{escape(visible(title))}</title>'
            f'<desc id="{name}-d">{escape(visible(description))}</desc>{"".join(self._marks)}</svg>'
        )

    def document(self, title: str, description: str, style: str) -> str:
        """The drawing as a file of its own, with its style sheet and a background."""
        width, height = f"{self.width:g}", f"{self.height:g}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" '
            f'aria-labelledby="title about" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}"><title id="title">{escape(visible(title))}</title>'
            f'<desc id="about">{escape(visible(description))}</desc><style>{style}</style>'
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>'
            f"{''.join(self._marks)}</svg>\n"
        )


def _fine(value: float) -> str:
    """Hundredths of a pixel: a launch may be thinner than a tenth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tip(text: str) -> str:
    return f"<title>{escape(visible(text))}</title>" if text else ""


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """A scale from values low..high to positions start..end."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    inner = linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(value))


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values within low..high, about as many as wanted."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """1, 2, 5 times powers of ten within low..high; fewer where they would crowd."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [factor * 10.0**power for power in powers for factor in factors]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= most:
            break
    return found


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The range of the values with some room on both sides."""
    low, high = min(values), max(values)
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room
