"""Charts as files: each is one SVG document, light or dark by the reader's preference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

from patcher.attempts import Attempt
from patcher.bench import Evaluation, Throughput
from patcher.bench.stats.shares import ShareInterval
from patcher.hotspot import Profile
from patcher.report import charts, views, wording
from patcher.report.bars import bars
from patcher.report.curves import WINDOW, Curve, over_updates, share_intervals
from patcher.report.lanes import lanes
from patcher.report.step import read_step, why_not
from patcher.report.svg import Canvas

_MARGIN = 24.0
_GAP = 20.0


def plot(profile: Profile, *, width: float = charts.WIDE) -> str:
    """A profile: the lanes of one decode step above the ranked hotspots.

    Args:
        profile: the profile, read or captured.
        width: pixels without the margin; below 500 it is laid out for a phone.

    Returns:
        An SVG document.
    """
    rows, step = views.hotspot_rows(profile), read_step(profile)
    facts = [profile.gpu.name if profile.gpu else None, profile.source]
    parts = [_head(profile.model, facts, width)]
    parts.append(lanes(step, width) if step else _note(why_not(profile), width))
    parts.append(bars(rows, width))
    about = f"{len(rows)} hotspots" + (
        f"; {len(step.launches)} launches in a step." if step else "."
    )
    return _document(f"Profile of {wording.clip(profile.model, 120)}", about, parts, width)


def plot_evaluation(evaluation: Evaluation, *, width: float = charts.WIDE) -> str:
    """An evaluation: time and speedup of the candidate over the sweep of sizes.

    Args:
        evaluation: the judge's result; without timings the picture shows the outcome.
        width: as for `plot`.

    Returns:
        An SVG document.
    """
    against = f"against {evaluation.baseline}" if evaluation.baseline else None
    facts = [wording.outcome(evaluation.outcome.value), evaluation.language, against]
    parts = [_head(evaluation.op, facts, width)]
    groups = [group for group in views.sweep_groups(evaluation.timings) if group.drawable]
    for group in groups:
        if group.fixed:
            parts.append(_note(group.fixed, width))
        parts.append(charts.sweep_times(group.rows, group.axis, width))
        parts.append(charts.sweep_speedups(group.rows, group.axis, width))
    if not groups:
        parts.append(_note("nothing was timed", width))
    about = f"{sum(len(group.rows) for group in groups)} points of the sweep."
    return _document(f"Evaluation of {evaluation.op}", about, parts, width)


def plot_attempts(title: str, attempts: Sequence[Attempt], *, width: float = charts.WIDE) -> str:
    """An agent loop: speedup of each candidate, the best so far as a line.

    Args:
        title: what was optimized.
        attempts: the iterations in order.
        width: as for `plot`.

    Returns:
        An SVG document.
    """
    rows = views.attempt_rows(attempts)
    right = sum(row.outcome == "correct" for row in rows)
    about = f"{len(rows)} iterations, {right} of them right and faster than the baseline"
    parts = [_head(title, [about], width)]
    parts.append(charts.attempts(rows, width) if rows else _note("no candidate yet", width))
    return _document(f"Speedup by iteration: {wording.clip(title, 120)}", f"{about}.", parts, width)


def plot_throughput(throughput: Throughput, *, width: float = charts.WIDE) -> str:
    """An end-to-end A/B: the gain's interval against the margin, and the gain of each pair.

    Args:
        throughput: the result of the A/B.
        width: as for `plot`.

    Returns:
        An SVG document.
    """
    found, control = throughput.comparison, throughput.control
    pairs = views.pair_rows(throughput.windows, "ab")
    control_pairs = views.pair_rows(throughput.windows, "aa")
    parts = [_head(throughput.workload.model, [found.figures, found.verdict], width)]
    parts.append(charts.interval_strip(found, width))
    if pairs:
        parts.append(charts.ab(pairs, found, control_pairs, control, width))
    about = f"{found.pairs} pairs; gain {found.figures}."
    return _document(f"Gain of {throughput.patch or 'samples'}", about, parts, width)


def plot_training(
    title: str,
    updates: Sequence[int],
    panels: Sequence[tuple[str, Sequence[Curve], bool]],
    evaluations: Sequence[tuple[str, dict[str, ShareInterval]]] = (),
    *,
    width: float = charts.WIDE,
) -> str:
    """A training: quantities over updates, and shares of evaluations, all with intervals.

    Args:
        title: of the training.
        updates: numbers of the updates.
        panels: title, curves, and whether they are shares, of each panel.
        evaluations: name and shares of each.
        width: as for `plot`.

    Returns:
        An SVG document.
    """
    about = f"{len(updates)} updates; moving means of {WINDOW} with 95 % intervals"
    parts = [_head(title, [about], width)]
    for name, curves, are_shares in panels:
        label = (lambda value: f"{value:.0%}") if are_shares else (lambda value: f"{value:.3g}")
        bounds = (0.0, 1.0) if are_shares else None
        parts.append(over_updates(name, updates, curves, width, label, bounds))
    if evaluations:
        parts.append(share_intervals(evaluations, width))
    return _document(f"Training: {wording.clip(title, 120)}", f"{about}.", parts, width)


def _document(title: str, about: str, parts: Sequence[Canvas], width: float) -> str:
    """The parts below one another."""
    margin = 12.0 if width < 500 else _MARGIN
    height = sum(part.height + _GAP for part in parts) - _GAP
    canvas = Canvas(width + 2 * margin, height + 2 * margin)
    top = margin
    for part in parts:
        canvas.place(part, margin, top)
        top += part.height + _GAP
    return canvas.document(title, about, _style())


def _head(title: str, facts: Sequence[str | None], width: float) -> Canvas:
    canvas = Canvas(width, 38)
    canvas.text(0, 15, wording.clip(title, int(width / 9.4)), "t title")
    line = ", ".join(fact for fact in facts if fact)
    canvas.text(0, 34, wording.clip(line, int(width / 6.4)), "t")
    return canvas


def _note(text: str, width: float) -> Canvas:
    """A paragraph, broken where it must be."""
    lines, room = [""], int((width - 24) / 6.4)
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    canvas = Canvas(width, 16 + 18 * len(lines))
    canvas.rect(0, 0, width, canvas.height, "lane", 6)
    for index, line in enumerate(lines):
        canvas.text(12, 20 + 18 * index, line, "t")
    return canvas


@cache
def _style() -> str:
    folder = resources.files("patcher.report")
    return "".join(
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("charts.css", "picture.css", "alone.css")
    )
