"""The report's charts: what is drawn lies inside, ticks are round, numbers read well."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_charts_sample import inside
from report_sample import comparison, sample

from patcher.bench import Timing
from patcher.report import charts, views, wording
from patcher.report.bars import bars
from patcher.report.svg import linear, log_ticks, logarithmic, padded, ticks
from patcher.visible import visible

WIDTHS = (charts.WIDE, charts.NARROW)


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert len(found) <= 7
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    assert found == sorted(set(found))


@given(st.floats(1e-3, 1e6), st.floats(1.5, 1e5))
def test_log_ticks(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert all(low * 0.998 <= tick <= low * factor * 1.002 for tick in found)
    scale = logarithmic(low, low * factor, 10, 110)
    assert scale(low) == pytest.approx(10)
    assert scale(low * factor) == pytest.approx(110)


def test_scales_of_nothing() -> None:
    assert linear(3, 3, 0, 100)(3) == 0
    assert ticks(1, 1) == [1]
    assert ticks(float("nan"), 1) == []
    low, high = padded([2.0])
    assert low < 2 < high


@pytest.mark.parametrize("width", WIDTHS)
@given(gain=st.floats(-30, 30), half=st.floats(1e-4, 40), margin=st.floats(0, 5))
def test_interval_strip_stays_inside(width: float, gain: float, half: float, margin: float) -> None:
    inside(charts.interval_strip(comparison(gain, half, 8, margin_pct=margin), width))


@pytest.mark.parametrize("width", WIDTHS)
def test_ab_draws_each_pair_once(width: float) -> None:
    report = sample()
    assert report.throughput is not None
    pairs = views.pair_rows(report.throughput.windows, "ab")
    control = views.pair_rows(report.throughput.windows, "aa")
    drawing = inside(
        charts.ab(pairs, report.throughput.comparison, control, report.throughput.control, width)
    )
    assert drawing.count("<circle") == len(pairs) + len(control) == 32
    alone = inside(charts.ab(pairs[:1], report.throughput.comparison, [], None, width))
    assert alone.count("<circle") == 1
    assert "A/A" not in alone


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("points", [1, 2, 7, 40])
def test_sweeps(width: float, points: int) -> None:
    timings = [
        Timing(
            axes={"tokens": 2**index, "hidden": 2880},
            candidate_us=0.5 + index,
            baseline_us=1 + 3 * index,
            speedup=(1 + 3 * index) / (0.5 + index),
            speedup_low=0.9,
            speedup_high=6.5,
            pairs=10,
            calls=100,
        )
        for index in range(points)
    ]
    (group,) = views.sweep_groups(timings)
    assert group.axis == "tokens"
    assert group.fixed == "hidden 2880"
    assert (
        inside(charts.sweep_times(group.rows, group.axis, width)).count("<circle") == 2 * points + 2
    )
    assert inside(charts.sweep_speedups(group.rows, group.axis, width)).count("<circle") == points


def test_a_repeated_point_begins_another_sweep() -> None:
    best = sample().best
    assert best is not None
    groups = views.sweep_groups([*best.timings, *best.timings])
    assert [len(group.rows) for group in groups] == [5, 5]
    broken = best.timings[0].model_copy(update={"candidate_us": 0.0})
    assert not views.sweep_groups([broken])[0].drawable
    endless = best.timings[0].model_copy(update={"speedup_high": float("inf")})
    assert not views.sweep_groups([endless])[0].drawable


@pytest.mark.parametrize("width", WIDTHS)
def test_attempts_and_hotspots(width: float) -> None:
    report = sample()
    rows = views.attempt_rows(report.attempts)
    drawing = inside(charts.attempts(rows, width))
    assert drawing.count("<circle") == 3
    assert drawing.count('class="cross"') == 3
    assert [row.iteration for row in rows if row.best] == [3]
    failed = [row for row in rows if row.speedup is None]
    assert inside(charts.attempts(failed[:1], width)).count("<circle") == 0
    spots = views.hotspot_rows(report.profile)
    lengths = [
        float(value)
        for value in re.findall(r'class="bar [^>]*? width="([\d.]+)"', inside(bars(spots, width)))
    ]
    shares = [row.share_pct for row in spots]
    assert [length / lengths[0] for length in lengths] == pytest.approx(
        [share / shares[0] for share in shares], abs=0.01
    )


def test_numbers_as_read() -> None:
    gap, minus, by = "\N{NO-BREAK SPACE}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
    assert wording.signed_percent(1.844) == f"+1.84{gap}%"
    assert wording.signed_percent(-0.5) == f"{minus}0.50{gap}%"
    assert wording.signed_percent(-0.001) == f"0.00{gap}%"
    assert wording.microseconds(13.44) == f"13.4{gap}\N{MICRO SIGN}s"
    assert wording.microseconds(14_600) == f"14.6{gap}ms"
    assert wording.microseconds(2.5e6) == f"2.50{gap}s"
    assert wording.number(11976.4, 5) == "11,976"
    assert wording.number(0.0) == "0"
    assert wording.number(3.1e-6) == f"3.10{by}10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT SIX}"
    assert wording.count(1152) == "1,152"
    assert wording.count(24.5) == "24.5"
    assert wording.times(3.536) == f"3.54{by}"
    assert wording.tick_percent(0.25) == f"+0.25{gap}%"
    assert wording.tick_microseconds(2500) == f"2.5{gap}ms"
    assert wording.moment("2026-11-21T09:19:00+02:00") == "2026-11-21 07:19 UTC"
    assert wording.sentence("the run stopped") == "The run stopped."
    assert wording.moment("yesterday") == "yesterday"
    assert wording.microseconds(None) == wording.count(None) == wording.times(None) == "\N{EN DASH}"


@given(st.text(max_size=200), st.integers(1, 60))
def test_clip_and_visible(text: str, limit: int) -> None:
    assert len(wording.clip(text, limit)) <= max(limit, 1)
    assert visible(visible(text)) == visible(text)
