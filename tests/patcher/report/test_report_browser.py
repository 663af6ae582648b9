"""The report in a real headless Chromium: drawn, quiet, linked, readable everywhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from report_lanes_sample import decode
from report_sample import full, sample, together

from patcher.report import write

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install 'patcher[dev]'"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt install chromium"),
]

Scheme = Literal["light", "dark"]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

DRAWN = """() => [...document.querySelectorAll('svg.chart')]
  .filter(chart => getComputedStyle(chart).display !== 'none')
  .map(chart => {
    const box = chart.getBoundingClientRect(), inner = chart.getBBox();
    const marks = [...chart.querySelectorAll('rect, circle, line, path')];
    const seen = marks.filter(mark => {
      const style = getComputedStyle(mark);
      return style.fill !== 'none' || style.stroke !== 'none';
    });
    const text = [...chart.querySelectorAll('text')].filter(one => {
      const place = one.getBoundingClientRect();
      return place.left < box.left - 2 || place.right > box.right + 2;
    }).map(one => one.textContent);
    return {name: chart.querySelector('title').textContent, width: box.width, height: box.height,
            inner: inner.width, marks: marks.length, seen: seen.length, outside: text};
  })"""
"""Every chart that is shown: its size, its marks, and what text runs out of it."""

CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const found = rgb(getComputedStyle(e).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest('svg, script, style, .skip')) continue;
    if (!element.checkVisibility()) continue;
    const ink = light(rgb(getComputedStyle(element).color)), page = light(behind(element));
    const ratio = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
    if (ratio < 4.5) poor.push([element.tagName, element.className, ratio.toFixed(2)]);
  }
  return poor;
}"""
"""Text whose contrast is below that of WCAG 2.1, AA."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Chromium has no sandbox of its own for root; the page is ours and loads nothing
        bare = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = driver.chromium.launch(executable_path=CHROMIUM, args=bare)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [path] = write(full(decode()), tmp_path_factory.mktemp("report"), ["html"])
    return path


class Loud:
    """What a page complains of, and what it asks the network for."""

    def __init__(self, page: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))


def opened(browser: Any, path: Path, size: dict[str, int], scheme: Scheme = "light") -> Any:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.loud = Loud(page)
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_every_chart_is_drawn_and_nothing_is_said(
    browser: Any, report: Path, size: dict[str, int], scheme: Scheme
) -> None:
    page = opened(browser, report, size, scheme)
    charts = page.evaluate(DRAWN)
    assert len(charts) == 10
    for chart in charts:
        assert chart["height"] > 50, chart
        assert chart["inner"] > 0.5 * chart["width"], chart
        assert chart["marks"] > 2, chart
        assert chart["seen"] > 0.9 * chart["marks"], chart
        assert not chart["outside"], chart
    # the page itself never scrolls sideways: what is wide scrolls in its own box
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.evaluate(CONTRAST) == []
    assert page.loud.said == []
    assert page.loud.asked == [report.as_uri()]
    page.close()


@pytest.mark.parametrize("size", [{"width": 1280, "height": 800}, PHONE], ids=["wide", "phone"])
def test_the_first_screen_has_the_verdict_and_the_interval_beside_the_margin(
    browser: Any, tmp_path: Path, size: dict[str, int]
) -> None:
    [path] = write(together(), tmp_path, ["html"])
    page = opened(browser, path, size)
    assert page.title().startswith("gpt-oss-tiny: accepted, +2.04")
    assert page.locator("h1").inner_text() == "gpt-oss-tiny: accepted"
    for what in (
        "h1",
        ".gain",
        ".range",
        "#verdict svg:visible .interval",
        "#verdict svg:visible .margin-text",
    ):
        box = page.locator(what).bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] < size["height"], what
    rows = page.get_by_role("region", name="Receipts").locator("tbody tr")
    assert rows.count() == 7
    page.close()


def test_every_link_goes_somewhere(browser: Any, report: Path) -> None:
    page = opened(browser, report, WIDE)
    page.emulate_media(reduced_motion="reduce")
    links = page.locator("a[href]")
    assert links.count() > 8
    for index in range(links.count()):
        link = links.nth(index)
        target = link.get_attribute("href")
        link.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("location.hash") == target
        assert page.locator(target).count() == 1
        top = page.locator(target).evaluate("e => e.getBoundingClientRect().top")
        assert top < WIDE["height"]
    assert page.loud.said == []
    page.close()


def test_the_keyboard_reaches_and_scrolls_what_is_wide(browser: Any, report: Path) -> None:
    page = opened(browser, report, PHONE)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the verdict"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    box = page.get_by_role("region", name="Reconciliation")
    box.focus()
    assert box.evaluate("e => document.activeElement === e && e.scrollWidth > e.clientWidth")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("e => e.scrollLeft > 0", arg=box.element_handle())
    summary = page.locator("summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert summary.evaluate("e => e.parentElement.open")
    page.close()


def test_a_screen_reader_is_told_what_is_there(browser: Any, report: Path) -> None:
    page = opened(browser, report, WIDE)
    for chart in page.get_by_role("img").all():
        if chart.is_visible():
            assert chart.evaluate("e => e.querySelector('desc').textContent.length") > 10
    for name in ("Accepted", "Is any other workload slower?", "Where does the time go?"):
        assert page.get_by_role("heading", name=name, exact=True).count() == 1
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("navigation", name="The path of this run").count() == 1
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    unnamed = page.eval_on_selector_all("th:not([scope])", "all => all.length")
    assert unnamed == 0
    page.close()


def test_it_prints_in_full(browser: Any, report: Path) -> None:
    page = opened(browser, report, {"width": 718, "height": 1000}, "dark")  # A4 less its margins
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide = page.eval_on_selector_all(
        ".box", "all => all.filter(e => e.scrollHeight > e.clientHeight + 2).length"
    )
    assert wide == 0  # nothing stays hidden in a box that cannot be scrolled on paper
    assert page.locator("svg.chart.wide").first.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF-")
    assert page.loud.said == []
    page.close()


def test_the_embedded_record_is_the_record(browser: Any, report: Path) -> None:
    page = opened(browser, report, WIDE)
    text = page.locator("#report-json").evaluate("e => e.textContent")
    assert json.loads(text) == full(decode()).model_dump(mode="json")
    page.close()


def test_nothing_in_it_can_run(browser: Any, tmp_path: Path) -> None:
    nasty = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    [path] = write(sample(title=nasty, candidate_source=nasty), tmp_path, ["html"])
    page = opened(browser, path, WIDE)
    assert "owned" not in page.title().replace(nasty, "")
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"https://x.invalid/\">')"
    )
    page.wait_for_function("document.querySelector('img').complete")
    assert [said for said in page.loud.said if "Content Security Policy" in said]
    assert page.evaluate("document.querySelector('img').naturalWidth") == 0
    page.close()
