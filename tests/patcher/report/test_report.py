"""The report: whole, with parts missing, and read back with an HTML parser."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from report_page import Page
from report_sample import comparison, decision, profile, sample, together, windows

from patcher.bench import Evaluation, Outcome, UsageError, Workload
from patcher.plan import RunPlan
from patcher.report import Report, render_html, render_json, render_markdown, views, wording, write
from patcher.report.gather import gather
from patcher.report.receipts import receipt_totals
from patcher.runs.run import Run

ABSENT = {
    "commands": (),
    "model": None,
    "workload": None,
    "profile": None,
    "attempts": (),
    "best": None,
    "candidate_source": None,
    "candidate_language": None,
    "patch_id": None,
    "throughput": None,
    "quality": None,
    "receipt": None,
    "reconciliation": None,
    "decision": None,
    "reverted_identical": None,
    "environment": None,
    "recorded_conversation": False,
}
SAYS = {
    "profile": "No profile was taken or read.",
    "attempts": "No iteration was recorded.",
    "best": "No candidate was judged.",
    "candidate_source": "There is no candidate.",
    "throughput": "The whole model was not measured.",
    "quality": "The patched model was not compared with the baseline.",
    "receipt": "No receipt was recorded.",
    "reverted_identical": "The revert was not tried.",
    "commands": "No command was recorded.",
    "decision": "No verdict",
    "elsewhere": "Other batch sizes, context lengths and peak memory were not measured.",
}


def test_whole_page() -> None:
    report = sample()
    text = render_html(report)
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert len(page.named("svg")) == 16  # eight charts, each for wide and for narrow screens
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for link in page.named("a"):
        assert str(link["href"])[1:] in ids
    for chart in page.named("svg"):
        assert chart["role"] == "img"
        assert set(str(chart["aria-labelledby"]).split()) <= set(ids)
    for box in page.named("div"):
        if "box" in str(box.get("class", "")).split():
            assert box["tabindex"] == "0"  # the keyboard scrolls it
            assert box["aria-label"]
    assert page.text.index("Accepted") < page.text.index("Where does the time go?")
    for part, sentence in SAYS.items():
        assert (sentence in page.text) == (part == "elsewhere")


def test_numbers_are_the_records() -> None:
    report = sample()
    page = Page(render_html(report)).text.replace("\N{NO-BREAK SPACE}", " ")
    assert report.throughput is not None
    assert report.best is not None
    found = report.throughput.comparison
    assert f"{found.gain_pct:+.2f} %" in page
    assert f"{found.gain_low_pct:+.2f} % to {found.gain_high_pct:+.2f} %" in page
    assert f"{found.confidence_pct:g} % interval" in page
    assert f"margin +{found.margin_pct:.2f} %" in page
    assert f"{found.baseline_tokens_per_s:.1f} tok/s" in page
    for timing in report.best.timings:
        assert f"{timing.speedup:.2f}\N{MULTIPLICATION SIGN}" in page
    for row in profile()["hotspots"]:
        assert f"{row['share_pct']:.2f} %" in page
    assert "In the A/B: 139,264 calls of the patched kernel" in page
    for pair in views.pair_rows(report.throughput.windows, "ab"):
        assert wording.signed_percent(pair.gain_pct, 3).replace("\N{NO-BREAK SPACE}", " ") in page


def test_source_is_whole_and_in_order() -> None:
    report = sample()
    lines = re.findall(r'<span class="l">(.*?)</span>', render_html(report).split('id="source"')[1])
    shown = (
        "\n".join(lines)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&#34;", '"')
        .replace("&amp;", "&")
    )
    assert shown.replace("&#39;", "'") == str(report.candidate_source).removesuffix("\n")


@pytest.mark.parametrize("part", ABSENT)
def test_each_part_may_be_absent(part: str) -> None:
    report = sample(**{part: ABSENT[part]})
    page = Page(render_html(report))
    if part in SAYS:
        assert SAYS[part] in page.text
    assert render_markdown(report).startswith("## ")
    assert Report.model_validate_json(render_json(report)) == report


def test_nothing_but_a_name() -> None:
    report = Report(
        run_id="r", created="2026-11-21T07:19:00+00:00", title="t", stopped="the budget is spent"
    )
    page = Page(render_html(report))
    for sentence in SAYS.values():
        assert sentence in page.text
    assert "The budget is spent." in page.text
    assert page.named("svg") == []
    markdown = render_markdown(report)
    assert markdown.startswith("## t: no verdict")
    assert "Not reached: Profile, Candidate, Judge" in markdown


def test_several_patches_are_told_by_their_number_and_have_a_row_each() -> None:
    report = together()
    page, markdown = Page(render_html(report)), render_markdown(report)
    assert "patcher report · 7 patches together" in page.text
    assert report.run_id not in page.text
    assert markdown.startswith("## gpt\\-oss\\-tiny: accepted, +2.04")
    for one in receipt_totals(report):
        assert one.patch in page.text
        row = f"| `{one.patch}` | {one.calls:,} | {one.fallbacks} |"
        assert row in markdown
    assert len(receipt_totals(sample())) == 1


def test_loads_nothing() -> None:
    rendered = render_html(sample())
    page = Page(rendered)
    for _, attributes in page.tags:
        assert not {"src", "srcset", "action", "data", "poster"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    assert not re.search(r"https?://|url\(|@import|//cdn", rendered.split('id="report-json"')[0])
    policies = [
        meta for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert str(policies[0]["content"]).startswith("default-src 'none'")


def test_verdict_words() -> None:
    for verdict, word in wording.VERDICTS.items():
        page = Page(render_html(sample(decision=decision(verdict))))
        assert word in page.text
    failed = Evaluation(
        op="o", language="cpp", digest="0" * 64, outcome=Outcome.RUNTIME_ERROR, log="signal 11"
    )
    page = Page(render_html(sample(best=failed, reverted_identical=False)))
    assert "runtime error" in page.text
    assert "No check ran." in page.text
    assert "differs from the output before the patch" in page.text


def test_write(tmp_path: Path) -> None:
    report = sample()
    paths = write(report, tmp_path / "new folder")
    assert [path.name for path in paths] == ["report.html", "report.md", "report.json"]
    assert Report.model_validate_json(paths[2].read_text(encoding="utf-8")) == report
    with pytest.raises(UsageError, match="pdf"):
        write(report, tmp_path, ["pdf"])
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot write"):
        write(report, tmp_path / "file", ["md"])


def test_recorded_samples_have_no_windows() -> None:
    whole = sample().throughput
    assert whole is not None
    bare = whole.model_copy(update={"windows": (), "control": None, "patch": None})
    page = Page(render_html(sample(throughput=bare, patch_id=None)))
    assert "The comparison has no recorded windows" in page.text
    assert "interleaved in one session" not in page.text
    assert "recorded samples" in page.text


def test_pairs_need_both_sides() -> None:
    some = windows(1.0, pairs=4)
    assert [row.pair for row in views.pair_rows(some[1:], "ab")] == [1, 2]
    assert [row.pair for row in views.pair_rows(some, "aa")] == [3]
    row = views.pair_rows(some, "ab")[0]
    assert row.gain_pct == pytest.approx((row.patched / row.baseline - 1) * 100)
    assert comparison(1.0, 0.2, 3).gain_low_pct == pytest.approx(0.8)


def test_the_command_of_a_run_has_what_was_asked_for(tmp_path: Path) -> None:
    load = Workload(
        model="a model", engine="vllm", device="cuda", dtype="float16", batch=8, input_len=128,
        output_len=64,
    )  # fmt: skip
    with Run.create(tmp_path, command="run", model="a model", workload=load) as run:
        [began, _] = gather(run).commands
    words = shlex.split(began)
    assert words[:3] == ["patcher", "run", "a model"]
    assert words[words.index("--engine") + 1] == "vllm"
    assert words[words.index("--dtype") + 1] == "float16"
    asked = {"model": "m", "diagnoser": "other one", "judge": "exchange:jobs", "budget_usd": 0.5}
    plan = RunPlan(op="rms_norm", whole=False, counters=False).model_dump(mode="json")
    settings = {**asked, "analyst": None, "budget_minutes": 0, "plan": plan}
    with Run.create(tmp_path, command="optimize", settings=settings) as run:
        [began, *_] = gather(run).commands
    assert began == (
        "patcher optimize rms_norm --model m --diagnoser 'other one' --no-counters "
        "--judge exchange:jobs --budget-usd 0.5 --budget-minutes 0"
    )
