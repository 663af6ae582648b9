"""Kernel names, sources and messages are hostile text: shown, never obeyed."""

from __future__ import annotations

import json
import re

import pytest
from report_page import Page
from report_sample import decision, evaluation, profile, sample, word

from patcher.bench import BaselineTime
from patcher.reconciling.reconcile import Reconciliation
from patcher.report import ReceiptRow, Report, render_html, render_markdown
from patcher.visible import visible

HOSTILE = (
    "</script><script>alert(1)</script>",
    "</script ",
    "<img src=x onerror=alert(1)>",
    "'\"><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;",
    "\N{RIGHT-TO-LEFT OVERRIDE}gnp\x00\x1b[31m\N{LINE SEPARATOR}",
    "\N{CJK UNIFIED IDEOGRAPH-6838}\N{FIRE} \N{CYRILLIC SMALL LETTER YA}",
    "k" * 10_000,
)


def hostile_report(text: str) -> Report:
    rows = profile()
    for row in (rows["kernels"][0], rows["hotspots"][0]):
        row.update(name=text, origin=text, operation=text, op=text)
    rows["source"] = text
    rows["warnings"] = [{"kind": text, "message": text}]
    base = sample()
    assert base.throughput is not None
    assert base.environment is not None
    attempts = tuple(attempt.model_copy(update={"detail": text}) for attempt in base.attempts)
    judged = evaluation().model_copy(
        update={
            "log": text,
            "baseline": text,
            "baselines": {text: BaselineTime(missing=text)},
            "op": text,
        }
    )
    return sample(
        title=text,
        run_id=text,
        created=text,
        model=text,
        profile=rows,
        attempts=attempts,
        best=judged,
        candidate_source=f"int a;\n{text}\nint b;",
        candidate_language=text,
        patch_id=text,
        commands=(text,),
        stopped=text,
        recorded_note=text,
        receipt=ReceiptRow(calls={text: 1}, fallbacks={text: 2}),
        decision=decision("reject", reasons=(text,)),
        environment=base.environment.model_copy(update={"device": text, "packages": {text: text}}),
        throughput=base.throughput.model_copy(update={"clocks": text, "patch": text}),
        reconciliation=hostile_reconciliation(text),
        words=(word(reason=text).model_copy(update={"by": text}),),
    )


def hostile_reconciliation(text: str) -> Reconciliation:
    found = sample().reconciliation
    assert found is not None
    update = {"name": text, "shape": text, "note": text}
    rows = tuple(row.model_copy(update=update) for row in found.rows)
    return found.model_copy(update={"rows": rows, "caveats": (text,), "said": text})


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_hostile_text_is_shown_and_not_obeyed(text: str) -> None:
    report = hostile_report(text)
    rendered = render_html(report)
    page = Page(rendered)
    assert len(page.named("script")) == 1
    assert page.named("script")[0]["type"] == "application/json"
    assert page.named("img") == []
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(page.named("svg")) == 16
    assert not set(page.data) & set("<>&\u2028")
    assert json.loads(page.data) == report.model_dump(mode="json")
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u2029\u202a-\u202e]", rendered)
    seen = visible(text).strip()
    assert seen in page.text or len(text) > 1000
    body, _ = rendered.split('id="report-json"')
    assert len(body) < 300_000


def test_markdown_cells_hold() -> None:
    for text in HOSTILE:
        markdown = render_markdown(hostile_report(text))
        outside = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", markdown, flags=re.S)
        assert "<script" not in outside
        assert "<img" not in outside
    rows = [
        line
        for line in render_markdown(hostile_report("a|b `c` @someone")).splitlines()
        if line.startswith("|")
    ]
    widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert widths == {6, 7, 8, 11}
    assert "@someone" not in re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", "\n".join(rows))


def test_fence_cannot_be_closed_by_the_source() -> None:
    markdown = render_markdown(sample(candidate_source="```\n</details>\n````\n"))
    assert "`````cpp\n```\n</details>\n````\n\n`````" in markdown
