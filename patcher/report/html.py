"""The report as one HTML file: no script, no network, no asset; charts are inline SVG.

A content security policy in the page forbids loading and running anything, whatever hostile names
or sources contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from patcher.report import charts, views, wording
from patcher.report.bars import bars
from patcher.report.lanes import lanes
from patcher.report.receipts import receipt_totals
from patcher.report.reconciled import reconciled
from patcher.report.record import Report
from patcher.report.samples import process_runs, samples
from patcher.report.step import Step, read_step, short, why_not
from patcher.report.svg import Canvas
from patcher.visible import visible

MOST_ROWS = 60
NAME_LIMIT = 240
"""Characters of a kernel name in a table; the embedded JSON holds all of it."""
TEXT_LIMIT = 4000
"""Characters of any other text but the source."""


def render_html(report: Report) -> str:
    """One self-contained page; it says which parts the report lacks."""
    hotspots = views.hotspot_rows(report.profile)
    step, step_after = read_step(report.profile), read_step(report.profile_after)
    span = max(one.wall_us for one in (step, step_after) if one) if step or step_after else None
    attempts = views.attempt_rows(report.attempts)
    throughput = report.throughput
    pairs = views.pair_rows(throughput.windows, "ab") if throughput else []
    control_pairs = views.pair_rows(throughput.windows, "aa") if throughput else []
    groups = views.sweep_groups(report.best.timings) if report.best else []
    return _template().render(
        report=report,
        head=views.headline(report),
        title=views.title(report),
        subject=views.subject(report),
        totals=receipt_totals(report),
        stages=views.stages(report),
        hotspots=hotspots[:MOST_ROWS],
        hotspots_left=len(hotspots) - len(hotspots[:MOST_ROWS]),
        pairs=pairs,
        control_pairs=control_pairs,
        dropped=max(0, len(pairs) - throughput.comparison.pairs) if throughput else 0,
        groups=groups,
        attempts=attempts,
        cost_head=views.COST_HEAD,
        cost_rows=views.cost_rows(report.ledger) if report.ledger else [],
        reconciliation=report.reconciliation,
        reconciled_chart=_reconciled(report),
        samples_chart=_samples(pairs),
        source_lines=(report.candidate_source or "").removesuffix("\n").split("\n"),
        strip_chart=_strip(report),
        ab_chart=_ab(report, pairs, control_pairs),
        step_chart=_lanes("step", step, span),
        step_after_chart=_lanes("step-after", step_after, span),
        no_step=why_not(report.profile) if report.profile and not step else "",
        no_step_after=why_not(report.profile_after)
        if report.profile_after and not step_after
        else "",
        clocks=views.clock_facts(throughput),
        hotspot_chart=_hotspots(hotspots),
        group_charts=[_group(index, group) for index, group in enumerate(groups)],
        attempts_chart=_attempts(attempts),
        embedded=Markup(embed_json(report)),
        css=Markup(_css()),
        name_limit=NAME_LIMIT,
    )


def embed_json(report: Report) -> str:
    """The record as JSON that cannot end its script element, nor open a comment in it."""
    text = json.dumps(report.model_dump(mode="json"), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("patcher.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=visible,
        clip=wording.clip,
        number=wording.number,
        count=wording.count,
        count_whole=lambda value: wording.count(round(value)),
        percent=wording.percent,
        signed=wording.signed_percent,
        us=wording.microseconds,
        ceiling=wording.ceiling,
        short=short,
        times=wording.times,
        outcome=wording.outcome,
        moment=wording.moment,
        whole=_whole,
        sentence=wording.sentence,
    )
    environment.globals["verdicts"] = wording.VERDICTS
    environment.finalize = _shown
    return environment.get_template("report.html.j2")


def _shown(value: object) -> object:
    """Show text of a record without interpreting it; autoescape comes after this."""
    return visible(wording.clip(value, TEXT_LIMIT)) if type(value) is str else value


def _whole(line: str) -> Markup:
    """A line of source, never clipped."""
    return escape(visible(line))


@cache
def _css() -> str:
    folder = resources.files("patcher.report")
    return "".join(
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "charts.css", "evidence.css", "picture.css")
    )


def _figure(name: str, title: str, description: str, draw: Callable[[float], Canvas]) -> Markup:
    """The chart twice, for wide and for narrow screens; the style sheet shows one of the two."""
    wide = draw(charts.WIDE).render(f"{name}-wide", title, description, "wide")
    narrow = draw(charts.NARROW).render(f"{name}-narrow", title, description, "narrow")
    return Markup(wide + narrow)


def _strip(report: Report) -> Markup | None:
    if report.throughput is None:
        return None
    found = report.throughput.comparison
    description = (
        f"Gain {wording.signed_percent(found.gain_pct)}, {found.confidence_pct:.4g} % interval "
        f"{wording.interval(found.gain_low_pct, found.gain_high_pct)}, "
        f"margin {wording.signed_percent(found.margin_pct)}."
    )
    return _figure(
        "strip",
        "Gain against the margin",
        description,
        lambda width: charts.interval_strip(found, width),
    )


def _ab(
    report: Report, pairs: list[views.PairRow], control_pairs: list[views.PairRow]
) -> Markup | None:
    if report.throughput is None or not pairs:
        return None
    found, control = report.throughput.comparison, report.throughput.control
    description = (
        f"{len(pairs)} pairs; mean gain {wording.signed_percent(found.gain_pct)}, interval "
        f"{wording.interval(found.gain_low_pct, found.gain_high_pct)}."
    )
    if control is not None:
        description += f" A/A control: {wording.signed_percent(control.gain_pct)}."
    return _figure(
        "ab",
        "Gain of each pair",
        description,
        lambda width: charts.ab(pairs, found, control_pairs, control, width),
    )


def _hotspots(rows: list[views.HotspotRow]) -> Markup | None:
    if not rows:
        return None
    first = wording.percent(rows[0].length_pct, 1)
    description = f"{len(rows)} hotspots; the first takes {first}."
    return _figure("hot", "Hotspots by share", description, lambda width: bars(rows, width))


def _lanes(name: str, step: Step | None, span_us: float | None) -> Markup | None:
    if step is None:
        return None
    description = (
        f"{len(step.launches)} launches in {wording.microseconds(step.wall_us)}; "
        f"{len(step.chains)} fusion chains; idle {wording.microseconds(step.gap_us)}."
    )
    title = "One decode step" + (", patched" if name == "step-after" else "")
    return _figure(name, title, description, lambda width: lanes(step, width, span_us))


def _samples(pairs: list[views.PairRow]) -> Markup | None:
    if not pairs:
        return None
    numbers = {process for process, *_ in process_runs(pairs)} - {None}
    where = f" in {len(numbers)} process pairs" if numbers else ""
    description = f"Tokens per second of both windows of {len(pairs)} pairs{where}."
    return _figure("samples", "Every window", description, lambda width: samples(pairs, width))


def _reconciled(report: Report) -> Markup | None:
    found = report.reconciliation
    if found is None or found.expected_us is None:
        return None
    title = "Expected and measured saving of a step"
    return _figure("reconciled", title, found.said, lambda width: reconciled(found, width))


def _group(index: int, group: views.SweepGroup) -> Markup | None:
    if not group.drawable:
        return None
    low = min(row.speedup for row in group.rows)
    high = max(row.speedup for row in group.rows)
    about = f"over {group.axis}" + (f", {group.fixed}" if group.fixed else "")
    times = _figure(
        f"sweep{index}",
        f"Time of one call {about}",
        f"{len(group.rows)} points, candidate and baseline.",
        lambda width: charts.sweep_times(group.rows, group.axis, width),
    )
    speedups = _figure(
        f"speedup{index}",
        f"Speedup {about}",
        f"From {wording.times(low)} to {wording.times(high)}.",
        lambda width: charts.sweep_speedups(group.rows, group.axis, width),
    )
    return times + speedups


def _attempts(rows: list[views.AttemptRow]) -> Markup | None:
    if not rows:
        return None
    right = sum(row.outcome == "correct" for row in rows)
    description = f"{len(rows)} iterations, {right} of them right and faster than the baseline."
    return _figure(
        "iterations",
        "Speedup by iteration",
        description,
        lambda width: charts.attempts(rows, width),
    )
