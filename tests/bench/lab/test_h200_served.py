"""The one pair of vLLM 0.33.0 as it is served on an H200: no verdict, and the page says so."""

from __future__ import annotations

from pathlib import Path

from patcher.ab.served_records import ServedResult
from patcher.ab.served_verdict import judge_served
from patcher.bench import content

FOLDER = Path(__file__).parents[3] / "bench/results/h200-vllm-0.33"
KEPT = ServedResult.model_validate_json(content(FOLDER / "served.json.xz"))


def test_its_processes_give_what_it_says_again() -> None:
    stated = KEPT.comparison
    assert judge_served(KEPT.header, KEPT.processes, stated.margin_pct) == stated
    assert stated.verdict == "inconclusive"
    assert stated.interval is None
    assert len({one.machine for one in KEPT.processes}) == 1


def test_the_page_has_its_figures() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for point in KEPT.comparison.points:
        stock, patched = (point.figures[arm] for arm in ("baseline", "patched"))
        rates = f"| {stock.output_tokens_per_s:,.1f} | {patched.output_tokens_per_s:,.1f} |"
        times = f"{stock.tpot_ms['p50']:.2f} to {patched.tpot_ms['p50']:.2f} ms"
        assert f"{rates} {point.gain_pct:+.0f} % | {times} |" in page
