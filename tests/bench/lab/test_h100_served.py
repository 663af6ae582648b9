"""The committed verdict of vLLM 0.33.0 as it is served on an H100: its processes give it again."""

from __future__ import annotations

from pathlib import Path

from patcher.ab.served_records import ServedResult
from patcher.ab.served_verdict import judge_served
from patcher.bench import content
from patcher.bench.ab.served import arm_orders

FOLDER = Path(__file__).parents[3] / "bench/results/h100-vllm-0.33"
KEPT = ServedResult.model_validate_json(content(FOLDER / "served.json.xz"))


def test_its_processes_give_the_verdict_again() -> None:
    stated = KEPT.comparison
    assert judge_served(KEPT.header, KEPT.processes, stated.margin_pct) == stated
    assert stated.verdict == "accept"


def test_arms_took_turns_and_a_pair_has_one_machine() -> None:
    taken = [(one.pair, one.arm) for one in KEPT.processes]
    assert taken == list(arm_orders(len(taken) // 2))
    for number in range(len(taken) // 2):
        assert len({one.machine for one in KEPT.processes if one.pair == number}) == 1


def test_the_page_has_its_figures() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for gain in (KEPT.comparison, *KEPT.comparison.points):
        low, high = f"{gain.gain_low_pct:+.1f}", f"{gain.gain_high_pct:+.1f}"
        assert f"**{gain.gain_pct:+.1f} %** [{low}, {high}]" in page
