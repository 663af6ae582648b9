"""The report of a comparison as it is served: HTML with its curves, Markdown, JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from patcher.ab.served_records import (
    PointGain,
    ServedComparison,
    ServedFigures,
    ServedGain,
    ServedResult,
)
from patcher.ab.served_words import alone, seen_by, side_said, told
from patcher.bench import UsageError
from patcher.bench.stats.comparison import Arm
from patcher.report import wording
from patcher.report.charts import NARROW, WIDE, legend
from patcher.report.markup import fence, plain, table
from patcher.report.svg import Canvas, linear, padded, ticks
from patcher.visible import visible

HEAD = (
    "point",
    "baseline tok/s",
    "patched tok/s",
    "gain",
    "TPOT p50 / p95 / p99 ms",
    "TTFT p50 / p95 / p99 ms",
    "ITL p50 / p95 / p99 ms",
    "a batch p50 / p90 / p99 ms",
    "total tok/s",
    "good req/s",
    "stalls",
)
ARMS: tuple[tuple[Arm, str], ...] = (("baseline", "base"), ("patched", "cand"))


def write_served(result: ServedResult, folder: Path) -> Path:
    """Write `report.html`, `report.md` and `report.json`; returns the first.

    Raises:
        UsageError: the folder cannot be written.
    """
    texts = {
        "html": served_html(result),
        "md": served_markdown(result),
        "json": result.model_dump_json(indent=2) + "\n",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            (folder / f"report.{suffix}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}", "give another --report"
        ) from error
    return folder / "report.html"


def served_html(result: ServedResult) -> str:
    """One self-contained page."""
    styles = resources.files("patcher.report")
    css = "".join(
        styles.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "charts.css")
    )
    head, rows = _table(result)
    environment = Environment(
        loader=PackageLoader("patcher.report", "."), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("served.html.j2").render(
        title=visible(_title(result)),
        seen=visible(seen_by(result.header)),
        facts=[visible(fact) for fact in _facts(result)],
        found=result.comparison,
        reasons=[visible(reason) for reason in result.comparison.reasons],
        rates=any(one.point.rate is not None for one in result.comparison.points),
        gains=_drawn(
            "gains",
            "Gain at each point",
            "Gain in output tokens per second at each point, with its interval.",
            partial(gains, result.comparison),
        ),
        charts=[
            (
                name,
                _drawn(
                    f"curve{index}",
                    f"Trace {name}",
                    "Tokens per second of a user and of the GPU, by number of users.",
                    partial(curve, points),
                ),
            )
            for index, (name, points) in enumerate(_by_trace(result).items())
            if len(points) > 1 and all(map(_times_users, points))
        ],
        head=head,
        rows=rows,
        commands=[visible(line) for line in _commands(result)],
        css=Markup(css),
    )


def served_markdown(result: ServedResult) -> str:
    """GitHub Markdown: the verdict, the points, the commands."""
    found = result.comparison
    head, cells = _table(result)
    rows = [[plain(cell) for cell in row] for row in cells]
    parts = [
        f"## {plain(_title(result))}: {found.verdict}",
        "\n".join(f"- {plain(reason)}" for reason in found.reasons),
        table(head, rows, " " + "r" * (len(head) - 1)),
        "\n".join(f"- {plain(fact)}" for fact in _facts(result)),
        fence("\n".join(_commands(result))),
    ]
    return "\n\n".join(parts) + "\n"


def _drawn(name: str, title: str, words: str, draw: Callable[[float], Canvas]) -> Markup:
    return Markup(
        "".join(
            draw(width).render(f"{name}-{css_class}", title, words, css_class)
            for width, css_class in ((WIDE, "wide"), (NARROW, "narrow"))
        )
    )


def gains(found: ServedComparison, width: float) -> Canvas:
    """The gain at each point and of their mean, each with its interval if it has one."""
    rows: list[tuple[str, ServedGain]] = [(each.point.label, each) for each in found.points]
    rows.append(("mean", found))
    step, top, left, right = 30.0, 12.0, 140.0, 16.0
    floor = top + step * len(rows)
    canvas = Canvas(width, floor + 24)
    ends = [end for _, each in rows for end in each.interval or ()]
    low, high = padded([0.0, *(each.gain_pct for _, each in rows), *ends])
    x = linear(low, high, left, width - right)
    for tick in ticks(low, high, 8 if width > 500 else 4):
        canvas.line(x(tick), top, x(tick), floor, "zero" if tick == 0 else "grid")
        canvas.text(x(tick), floor + 18, wording.tick_percent(tick), "t", "middle")
    for index, (label, each) in enumerate(rows):
        y = top + step * (index + 0.5)
        css = "total" if label == "mean" else "cand"
        canvas.text(left - 12, y + 4, label, "t strong", "end")
        if each.interval:
            lower, upper = map(x, each.interval)
            canvas.line(lower, y, upper, y, f"whisker {css}")
        canvas.dot(x(each.gain_pct), y, 4.6, f"dot solid {css}", f"{label}: {each.said}")
    return canvas


def curve(points: Sequence[PointGain], width: float) -> Canvas:
    """Tokens per second of one user against those of the GPU, a line for each side."""
    height, left, right, top, bottom = 300.0, 64.0, 16.0, 30.0, 44.0
    canvas = Canvas(width, height)
    every = [one.figures[arm] for one in points for arm, _ in ARMS]
    low, high = padded([0.0, *map(_of_user, every)])
    x = linear(max(low, 0), high, left, width - right)
    floor, ceiling = padded([0.0, *(one.output_tokens_per_s for one in every)])
    y = linear(max(floor, 0), ceiling, height - bottom, top)
    for tick in ticks(max(floor, 0), ceiling):
        canvas.line(left, y(tick), width - right, y(tick), "grid")
        canvas.text(left - 8, y(tick) + 4, f"{tick:,.0f}", "t", "end")
    for tick in ticks(max(low, 0), high, 8 if width > 500 else 4):
        canvas.text(x(tick), height - bottom + 18, f"{tick:,.0f}", "t", "middle")
    canvas.line(left, height - bottom, width - right, height - bottom, "axis")
    for arm, css in ARMS:
        seen = [(one, one.figures[arm]) for one in points]
        places = [(x(_of_user(each)), y(each.output_tokens_per_s)) for _, each in seen]
        canvas.path(places, f"series {css}")
        for (one, each), place in zip(seen, places, strict=True):
            tip = f"{arm}, {one.point.label}: {each.output_tokens_per_s:,.0f} tok/s"
            canvas.dot(*place, 4.2, f"dot solid {css}", tip)
    canvas.text(left - 52, 15, "tokens/s of the GPU", "t")
    legend(canvas, [("base", "baseline"), ("cand", "patched")], width - right - 180, 15)
    canvas.text((left + width) / 2, height - 8, "tokens/s of one user", "t", "middle")
    return canvas


def _of_user(figures: ServedFigures) -> float:
    assert figures.user_tokens_per_s is not None  # `_times_users` looked
    return figures.user_tokens_per_s


def _times_users(point: PointGain) -> bool:
    return all(one.user_tokens_per_s is not None for one in point.figures.values())


def _by_trace(result: ServedResult) -> dict[str, list[PointGain]]:
    found: dict[str, list[PointGain]] = {}
    for one in result.comparison.points:
        if one.point.rate is not None:
            continue
        found.setdefault(one.point.trace, []).append(one)
    return {
        name: sorted(each, key=lambda one: one.point.concurrency) for name, each in found.items()
    }


def _title(result: ServedResult) -> str:
    header = result.header
    gain = f"{result.comparison.gain_pct:+.2f} % tokens per second"
    return f"{header.workload.model} in {header.workload.engine} {seen_by(header)}, {gain}"


def _facts(result: ServedResult) -> list[str]:
    header = result.header
    sides = [
        f"{role}: {side_said(header, side)}" + "".join(f", {name}" for name in side.patches)
        for role, side in zip(("baseline", "patched"), header.sides, strict=True)
    ]
    traces = [f"trace {name}: {trace.summary}" for name, trace in header.traces.items()]
    return [
        *sides,
        *traces,
        *alone(header),
        f"{header.workload.dtype}, {header.workload.weights} weights; the same model was not "
        "checked here: see `patcher throughput compare` without --client",
        f"{result.environment.device}, driver {result.environment.driver}",
        f"clocks {result.clocks}",
        *([f"measured {result.created}"] if result.created else []),
    ]


def _commands(result: ServedResult) -> list[str]:
    own = [result.command] if result.command else []
    return [*own, *map(shlex.join, filter(None, (result.header.serve, result.header.bench)))]


def _table(result: ServedResult) -> tuple[list[str], list[list[str]]]:
    return told(HEAD, [_row(point) for point in result.comparison.points])


def _row(point: PointGain) -> list[str]:
    both = [point.figures[arm] for arm, _ in ARMS]

    def times(name: str, digits: int, keys: Sequence[str] = ("p50", "p95", "p99")) -> str:
        tables = [getattr(one, name) for one in both]
        if not all(tables):
            return ""
        return "; ".join(" / ".join(f"{each[key]:.{digits}f}" for key in keys) for each in tables)

    def each(name: str, digits: int) -> str:
        values = [getattr(one, name) for one in both]
        return "" if None in values else "; ".join(f"{value:.{digits}f}" for value in values)

    return [
        point.point.label,
        *(f"{one.output_tokens_per_s:,.1f}" for one in both),
        point.said if point.point.rate is None else f"{point.said}, of a user",
        times("tpot_ms", 3),
        times("ttft_ms", 0),
        times("itl_ms", 3),
        times("batch_ms", 1, ("p50", "p90", "p99")),
        "; ".join(f"{one.total_tokens_per_s:,.0f}" for one in both),
        each("goodput_per_s", 2),
        each("stalls", 0),
    ]
