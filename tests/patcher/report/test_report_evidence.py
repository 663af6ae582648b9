"""What a report shows of reconciliation, processes, speed of light, both steps, other traffic."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from report_charts_sample import inside
from report_lanes_sample import decode
from report_page import Page
from report_sample import full, in_processes, patched_kernel, sample, throughput_of, windows
from rich.console import Console

from patcher.bench.judge.ceilings import Ceilings
from patcher.reconciling.reconcile import GainRow, Reconciliation, reconcile
from patcher.report import Report, charts, render_html, render_json, render_markdown, views
from patcher.report.reconciled import MOST_ROWS, reconciled
from patcher.report.samples import process_runs, samples
from patcher.show.evaluation import evaluation_table

WIDTHS = (charts.WIDE, charts.NARROW)


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


def test_everything_at_once() -> None:
    report = full(decode())
    page = Page(render_html(report))
    assert len(page.named("svg")) == 20  # ten charts, each for wide and for narrow screens
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    text = plain(page.text)
    assert report.reconciliation is not None
    assert report.reconciliation.said[1:] in text
    for row in report.reconciliation.rows:
        assert row.name[:40] in text
    for caveat in report.reconciliation.caveats:
        assert caveat[1:60] in text
    assert "After: the patched engine" in text
    assert "no loss above 1 %" in text.lower()
    assert "Peak memory 58,368 MiB before, 58,432 MiB patched: +0.11 %" in text
    assert "norm + rope" in text
    assert "SM clock1,965 to 1,965 MHz" in text.replace("\n", "")
    assert "A person said reject: nobody can maintain this source" in text
    assert Report.model_validate_json(render_json(report)) == report
    markdown = render_markdown(report)
    assert "| **expected** |" in markdown
    assert "### Other workloads" in markdown
    assert "### Combinations of patches" in markdown
    assert "nobody can maintain this source" in markdown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_every_window_is_drawn_in_its_process(width: float, size: int) -> None:
    rows = views.pair_rows(in_processes(windows(1.0, pairs=32), size), "ab")
    drawing = inside(samples(rows, width))
    assert drawing.count("<circle") == 2 * len(rows) + 2  # and the legend's
    runs = process_runs(rows)
    assert sum(last - first + 1 for *_, first, last in runs) == len(rows)
    assert drawing.count('class="process"') == -(-len(runs) // 2)
    gain = charts.ab(rows, throughput_of().comparison, [], None, width)
    assert inside(gain).count("process-edge") == len(runs) - 1


def test_windows_that_name_no_process_have_no_bands() -> None:
    rows = views.pair_rows(windows(1.0, pairs=8), "ab")
    drawing = inside(samples(rows, charts.WIDE))
    assert "process" not in drawing
    assert inside(samples(rows[:1], charts.NARROW)).count("<circle") == 4


@pytest.mark.parametrize("width", WIDTHS)
def test_the_speed_of_light_is_a_line_where_it_is_known(width: float) -> None:
    best = full(decode()).best
    assert best is not None
    (group,) = views.sweep_groups(best.timings)
    row = group.rows[0]
    assert row.sol_us == pytest.approx(row.candidate_us * 0.08)
    drawing = inside(charts.sweep_times(group.rows, group.axis, width))
    assert drawing.count('class="series sol"') == 1
    assert "speed of light" in drawing
    single = inside(charts.sweep_times(group.rows[:1], group.axis, width))
    assert single.count('class="series sol"') == 1
    unlit = sample().best
    assert unlit is not None
    (group,) = views.sweep_groups(unlit.timings)
    assert "series sol" not in inside(charts.sweep_times(group.rows, group.axis, width))


def widths(drawing: str) -> list[float]:
    return [float(value) for value in re.findall(r'class="bar [^>]*? width="([\d.]+)"', drawing)]


@pytest.mark.parametrize("width", WIDTHS)
def test_reconciliation_bars_are_as_long_as_their_rows(width: float) -> None:
    found = reconcile([patched_kernel(), patched_kernel(8)], throughput_of())
    drawing = inside(reconciled(found, width))
    lengths = widths(drawing)
    saved = [row.saved_us or 0 for row in found.rows] + [found.expected_us or 0, found.measured_us]
    assert [one / lengths[-1] for one in lengths] == pytest.approx(
        [one / saved[-1] for one in saved], abs=0.01
    )
    assert drawing.count('class="whisker') == 3 * len(saved)


@pytest.mark.parametrize("width", WIDTHS)
def test_many_rows_and_losses_stay_inside(width: float) -> None:
    rows: list[dict[str, Any]] = [
        {"name": f"k{index}" * 30, "kind": "moved", "saved_us": 50.0 - index * 9}
        for index in range(MOST_ROWS + 5)
    ]
    base = reconcile([patched_kernel()], throughput_of())
    moved = tuple(GainRow.model_validate(row) for row in rows)
    found: Reconciliation = base.model_copy(update={"rows": (*base.rows, *moved)})
    drawing = inside(reconciled(found, width))
    assert len(widths(drawing)) == MOST_ROWS + 3
    assert "6 more rows of the profile" in drawing


def test_a_report_that_was_not_reconciled_says_why() -> None:
    none = reconcile([patched_kernel(launches=None)], throughput_of())
    page = Page(render_html(sample(reconciliation=none)))
    assert "how often it runs in a decode step was not recorded" in page.text
    assert len(page.named("svg")) == 14
    assert "were not reconciled" in render_markdown(sample(reconciliation=None))


def test_a_small_kernel_is_held_against_the_launch_floor() -> None:
    at_best = Ceilings(
        device="NVIDIA H200",
        memory_gb_s=4000,
        cached_gb_s=9000,
        flops={"bf16": 7e14},
        launch_us=1.2,
    )
    assert at_best.launch_pct(1.5) == pytest.approx(80)
    assert at_best.model_copy(update={"launch_us": 0.0}).launch_pct(1.5) is None
    report = full(decode())
    assert report.best is not None
    near = tuple(one.model_copy(update={"launch_pct": 80.4}) for one in report.best.timings)
    told = report.best.model_copy(update={"timings": near})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(evaluation_table(told))
    assert "of launch floor" in (text := console.export_text())
    assert text.count("80 %") == len(near)
    page = plain(render_html(report.model_copy(update={"best": told})))
    assert page.count("80 %") == plain(render_html(report)).count("80 %") + len(near)
    written = plain(render_markdown(report.model_copy(update={"best": told})))
    assert "Launch floor" in written
    assert "80 %" in written
