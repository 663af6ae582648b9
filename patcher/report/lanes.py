"""One decode step as a drawing: a lane for each operation, and two layers at a larger scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from patcher.report import wording
from patcher.report.step import Launch, Span, Step, StepWindow, short, window
from patcher.report.svg import Canvas, Scale, linear, ticks

COLOURS = 6
"""Number of colours for chains; a seventh chain has the first colour again."""
_SANS, _SMALL = 6.9, 6.5
"""Width of a character in labels and in names on a launch, in the widest of the usual fonts."""
_THIN = 0.5
"""Pixels below which neighbours are drawn as one."""
_TIP = 90
"""Characters of a kernel name in a tooltip."""


class _Frame:
    """Position of lanes and labels: side by side, or on a narrow screen one above the other."""

    def __init__(self, width: float) -> None:
        self.narrow = width < 500
        self.left = 0.0 if self.narrow else 268.0
        self.right = width - (4 if self.narrow else 16)
        self.pitch = 38.0 if self.narrow else 23.0
        self.drop = 16.0 if self.narrow else 0.0
        """From the top of a row to its lane."""
        self.height = 15.0

    def label(self, canvas: Canvas, top: float, name: str, share: str, time: str) -> None:
        y = top + 11.5
        end = self.right if self.narrow else self.left - 12
        room = (end - (130 if self.narrow else 128)) / _SANS
        canvas.text(0, y, wording.clip(name, int(room)), "t strong")
        canvas.text(end - 64, y, share, "t", "end")
        canvas.text(end, y, time, "t", "end")


def lanes(step: Step, width: float, span_us: float | None = None) -> Canvas:
    """The whole step above, some layers of it below; the band marks their position.

    Args:
        span_us: time that the width represents, to compare two steps.
    """
    span = max(span_us or 0.0, step.wall_us)
    frame = _Frame(width)
    view = window(step, 1 if frame.narrow else 2)
    head, axis = 26.0, 44.0
    rows = len(step.lanes) + 1 + bool(step.runs)
    inside = [
        lane for lane in step.lanes if any(_overlaps(launch, view) for launch in lane.launches)
    ]
    names = [(f"chain c{number % COLOURS}", name) for number, name in step.chains.items()]
    entries = [("launch", "launch"), *names, ("idle", _idle_label(step))]
    legend = legend_height(entries, width)
    top = head + legend
    bottom = top + rows * frame.pitch
    zoom_top = bottom + axis + 30
    zoom_rows = len(inside) + 1 + bool(step.runs)
    canvas = Canvas(width, zoom_top + 8 + zoom_rows * frame.pitch + 24)
    _title(canvas, step, width)
    draw_legend(canvas, entries, head, width)
    x = linear(0, span, frame.left, frame.right)
    band = x(view.start_us), x(view.end_us)
    canvas.rect(band[0], top - 4, max(band[1] - band[0], 1), bottom - top + 4, "window")
    canvas.area(
        [
            (band[0], bottom),
            (max(band[1], band[0] + 1), bottom),
            (frame.right, zoom_top),
            (frame.left, zoom_top),
        ],
        "window",
    )
    _axis(canvas, frame, x, (0.0, span), bottom)
    _whole(canvas, frame, step, x, top)
    part = f"{view.words}: {wording.microseconds(view.end_us - view.start_us)}"
    canvas.text(0, zoom_top - 12, part[0].upper() + part[1:], "t strong")
    x = linear(view.start_us, view.end_us, frame.left, frame.right)
    end = zoom_top + 8 + zoom_rows * frame.pitch
    _axis(canvas, frame, x, (view.start_us, view.end_us), end)
    _part(canvas, frame, step, view, x, zoom_top + 8)
    return canvas


def _title(canvas: Canvas, step: Step, width: float) -> None:
    found = f"{len(step.launches)} launches in {wording.microseconds(step.wall_us)}"
    canvas.text(0, 13, f"One decode step: {found}", "t strong")
    if width > 700:
        note = "share of the step, time in it; microseconds from its start"
        canvas.text(width - 16, 13, note, "t", "end")


def _whole(canvas: Canvas, frame: _Frame, step: Step, x: Scale, top: float) -> None:
    """All launches; those thinner than half a pixel join their neighbours."""
    for name, time, lane in _rows(step, None):
        y = top + frame.drop + 1
        frame.label(canvas, top, name, _share(time, step), wording.microseconds(time))
        canvas.rect(frame.left, y, frame.right - frame.left, frame.height, "lane")
        if lane == "idle":
            _density(canvas, frame, step.gaps, x, y)
        elif lane == "chains":
            for number, (start, end) in step.runs:
                tip = "" if frame.narrow else step.chains[number]
                canvas.rect(x(start), y, x(end) - x(start), frame.height, _css(number), tip=tip)
        else:
            scale = x(1) - x(0)
            for group in joined(lane, scale):
                spent = sum(launch.duration_us for launch in group)
                tip = "" if frame.narrow else _tip(group)  # a phone shows no tooltip
                start = x(group[0].start_us)
                css = f"launch {_css(group[0].chain)}".strip()
                canvas.rect(start, y, spent * scale, frame.height, css, tip=tip)
        top += frame.pitch


def _part(
    canvas: Canvas, frame: _Frame, step: Step, view: StepWindow, x: Scale, top: float
) -> None:
    """The launches of a window, with names where there is room in or behind them."""
    left, right = frame.left, frame.right

    def clipped(start: float, end: float) -> Span:
        return max(x(start), left), min(x(end), right)

    for name, time, lane in _rows(step, view):
        y = top + frame.drop + 1
        share = wording.percent(100 * time / (view.end_us - view.start_us), 1)
        frame.label(canvas, top, name, share, wording.microseconds(time))
        canvas.rect(left, y, right - left, frame.height, "lane")
        marks: list[tuple[Span, str, str, str]] = []
        if lane == "idle":
            marks = [
                (clipped(*gap), "idle", "", f"{gap[1] - gap[0]:.2f} \N{MICRO SIGN}s")
                for gap in step.gaps
                if _within(gap, view)
            ]
        elif lane == "chains":
            marks = [
                (clipped(*span), _css(number), step.chains[number], step.chains[number])
                for number, span in step.runs
                if _within(span, view)
            ]
        else:
            marks = [
                (
                    clipped(launch.start_us, launch.end_us),
                    f"launch {_css(launch.chain)}".strip(),
                    short(launch.name),
                    _tip([launch]),
                )
                for launch in lane
                if _overlaps(launch, view)
            ]
        for index, ((start, end), css, text, tip) in enumerate(marks):
            after = marks[index + 1][0][0] if index + 1 < len(marks) else right
            width = end - start
            canvas.rect(start, y, width, frame.height, css, tip="" if frame.narrow else tip)
            inner, behind = int((width - 6) / _SMALL), int((after - end - 8) / _SMALL)
            if inner >= min(len(text), 9) and text:
                canvas.text(start + 3, y + 11, wording.clip(text, inner), "t small on")
            elif behind >= min(len(text), 6) and text:
                canvas.text(end + 4, y + 11, wording.clip(text, behind), "t small")
        top += frame.pitch


_LaneKind = tuple[Launch, ...] | Literal["idle", "chains"]


def _rows(step: Step, view: StepWindow | None) -> Iterator[tuple[str, float, _LaneKind]]:
    """(label, microseconds, launches) of each lane; idle time and chains come first and last."""

    def inside(start: float, end: float) -> float:
        if view is None:
            return end - start
        return max(0.0, min(end, view.end_us) - max(start, view.start_us))

    if step.runs:
        yield "in fusion chains", sum(inside(*span) for _, span in step.runs), "chains"
    for lane in step.lanes:
        time = sum(inside(launch.start_us, launch.end_us) for launch in lane.launches)
        if time > 0 or view is None:
            yield lane.operation, time, lane.launches
    yield _idle_label(step), sum(inside(*gap) for gap in step.gaps), "idle"


def joined(launches: Sequence[Launch], scale: float) -> list[list[Launch]]:
    """Launches by the mark that draws them, `scale` pixels to a microsecond.

    A mark is as wide as the sum of its launches, and at most a pixel if it has several. So the
    drawn time is exact, and no launch moves by more than a pixel.
    """
    groups: list[list[Launch]] = []
    for launch in launches:
        first = groups[-1][0] if groups else None
        if (
            first is not None
            and first.chain == launch.chain
            and max(first.duration_us, launch.duration_us) * scale < _THIN
            and (launch.end_us - first.start_us) * scale < 2 * _THIN
        ):
            groups[-1].append(launch)
        else:
            groups.append([launch])
    return groups


def _density(canvas: Canvas, frame: _Frame, gaps: Sequence[Span], x: Scale, y: float) -> None:
    """Idle time in columns of two pixels, each as high as its idle share, since single gaps are too
    thin to see.
    """
    columns = int((frame.right - frame.left) / 2)
    idle = [0.0] * (columns + 1)
    for start, end in gaps:
        low, high = (x(start) - frame.left) / 2, (x(end) - frame.left) / 2
        for column in range(int(low), min(int(high), columns) + 1):
            idle[column] += max(0.0, min(high, column + 1) - max(low, column))
    floor = y + frame.height
    points = [(frame.left, floor)]
    for column, share in enumerate(idle):
        level = floor - min(share, 1.0) * frame.height
        points += [(frame.left + 2 * column + side, level) for side in (0, 2)]
    canvas.area([*points, (frame.left + 2 * columns + 2, floor)], "idle")


def _axis(canvas: Canvas, frame: _Frame, x: Scale, values: Span, floor: float) -> None:
    canvas.line(frame.left, floor, frame.right, floor, "axis")
    for tick in ticks(*values, 4 if frame.narrow else 8):
        canvas.line(x(tick), floor, x(tick), floor + 4, "axis")
        text = f"{tick:,.6g}"
        room = len(text) * _SANS / 2
        anchor = "middle"
        if x(tick) - room < frame.left:
            anchor = "start"
        elif x(tick) + room > frame.right:
            anchor = "end"
        canvas.text(x(tick), floor + 17, text, "t", anchor)
    if not frame.narrow:
        canvas.text(frame.left - 12, floor + 17, "\N{MICRO SIGN}s", "t", "end")


def _legend(entries: Sequence[tuple[str, str]], width: float) -> Iterator[tuple[float, int]]:
    """(x, line) of each entry."""
    x, line = 0.0, 0
    for _, name in entries:
        needed = 17 + len(_fitting(name, width)) * _SANS
        if x and x + needed > width:
            x, line = 0.0, line + 1
        yield x, line
        x += needed + 16


def _fitting(name: str, width: float) -> str:
    return wording.clip(name, min(60, int((width - 20) / _SANS)))


def legend_height(entries: Sequence[tuple[str, str]], width: float) -> float:
    return 20.0 * (max((line for _, line in _legend(entries, width)), default=0) + 1) + 6


def draw_legend(
    canvas: Canvas, entries: Sequence[tuple[str, str]], top: float, width: float
) -> None:
    """Swatches with names, as many lines as they need; a hatched one where the class says so."""
    for (css, name), (x, line) in zip(entries, _legend(entries, width), strict=True):
        y = top + 20 * line
        canvas.rect(x, y, 11, 11, css, 2)
        if "hatched" in css.split():
            canvas.hatch(x, y, 11, 11, "hatching")
        canvas.text(x + 17, y + 9.5, _fitting(name, width), "t")


def _css(chain: int | None) -> str:
    return "" if chain is None else f"chain c{chain % COLOURS}"


def _share(time: float, step: Step) -> str:
    return wording.percent(100 * time / step.wall_us if step.wall_us else None, 1)


def _idle_label(step: Step) -> str:
    return "idle, or copies" if step.copies else "idle"


def _tip(group: Sequence[Launch]) -> str:
    first = group[0]
    name = wording.clip(short(first.name), _TIP)
    if len(group) > 1:
        name = f"{len(group)} launches: {name}, ..."
    spent = sum(launch.duration_us for launch in group)
    return f"{name}, at {first.start_us:.1f} \N{MICRO SIGN}s, {spent:.2f} \N{MICRO SIGN}s"


def _overlaps(launch: Launch, view: StepWindow) -> bool:
    return _within((launch.start_us, launch.end_us), view)


def _within(span: Span, view: StepWindow) -> bool:
    return span[0] < view.end_us and span[1] > view.start_us
