"""The verdict on gpt-oss-20b by blocks: its samples give it again, and pages have its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.ab.decision import decide
from patcher.ab.verdict import read_result
from patcher.bench import Evaluation, content
from patcher.bench.ab.throughput import compare_windows
from patcher.bench.ab.windows import PairKind
from patcher.hotspot.step_bytes import step_bytes

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "bench/results/h200-vllm-0.33"
KEPT = read_result(FOLDER / "blocks.json.xz")
THROUGHPUT = KEPT.measured[0].throughput
COPY_BYTES_PER_S = 4305e9
"""What a copy reaches on an H200: `bench/results/ceilings`."""
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("bench/results/h200-vllm-0.33/README.md", "docs/results.md", "README.md")
}


@pytest.mark.parametrize("kind", ["ab", "aa"])
def test_its_windows_give_the_comparison_and_the_control_again(kind: PairKind) -> None:
    stated = THROUGHPUT.comparison if kind == "ab" else THROUGHPUT.control
    assert stated is not None
    windows = list(THROUGHPUT.windows)
    again = compare_windows(windows, kind, stated.margin_pct, stated.confidence_pct)
    assert again is not None
    assert again.model_dump(exclude={"reason"}) == stated.model_dump(exclude={"reason"})


def test_every_patch_ran_and_nothing_but_prefill_was_left() -> None:
    decode = sum(window.kernel_calls or 0 for window in THROUGHPUT.windows)
    assert sum(one.receipt.total_calls for one in KEPT.measured) == decode
    for one in KEPT.measured:
        assert one.receipt.layers_refused == {}
        assert one.receipt.failure is None
        [(why, left)] = one.receipt.fallbacks.items()
        assert (why.startswith(("tokens above", "more than one token")), left) == (True, 720)


def test_it_is_decided_again() -> None:
    [file] = (ROOT / "bench/results/kernels").glob("moe_block-*.json.xz")
    judged = Evaluation.model_validate_json(content(file))
    assert KEPT.patches[0] == f"moe_block-cuda-{judged.digest[:8]}"
    again = decide(KEPT.measured[0], judged, KEPT.reconciliation)
    assert again == KEPT.decisions[0]
    assert again.verdict == "accept"


def test_the_floor_is_what_the_ledger_counts() -> None:
    elsewhere = KEPT.measured[0].other_workloads
    assert elsewhere is not None
    rates = {one.batch: one.comparison for one in elsewhere.points} | {8: THROUGHPUT.comparison}
    work = THROUGHPUT.workload
    told: dict[str, list[str]] = {"GB": [], "ms": [], "stock": [], "blocks": []}
    for batch, found in sorted(rates.items()):
        counted = step_bytes(work.model, batch, work.input_len + work.output_len // 2)
        moved = sum(role.weights + role.kv for role in counted.roles.values())
        floor_s = moved / COPY_BYTES_PER_S
        told["GB"].append(f"{moved / 1e9:.2f}")
        told["ms"].append(f"{1e3 * floor_s:.2f}")
        told["stock"].append(f"{100 * floor_s * found.baseline_tokens_per_s / batch:.0f}")
        told["blocks"].append(f"{100 * floor_s * found.patched_tokens_per_s / batch:.0f}")
    said = {name: "{}, {} and {}".format(*each) for name, each in told.items()}
    page = PAGES["bench/results/h200-vllm-0.33/README.md"]
    assert f"{said['GB']} GB a step" in page
    assert f"{said['ms']} ms, so {said['blocks']} % of light" in page
    assert f"Stock: {said['stock']} %." in page
    shares = [
        f"{one} to {other} %" for one, other in zip(told["stock"], told["blocks"], strict=True)
    ]
    assert f"stock to blocks | {' | '.join(shares)} |" in PAGES["docs/results.md"]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_its_figures(page: str) -> None:
    elsewhere = KEPT.measured[0].other_workloads
    assert elsewhere is not None
    digits = 2 if page.startswith("bench") else 1
    for found in (THROUGHPUT.comparison, *(one.comparison for one in elsewhere.points)):
        gain, low, high = (
            f"{value:+.{digits}f}"
            for value in (found.gain_pct, found.gain_low_pct, found.gain_high_pct)
        )
        assert f"{gain} %" in PAGES[page]
        assert f"[{low}, {high}]" in PAGES[page]
