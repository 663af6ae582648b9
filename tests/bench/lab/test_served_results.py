"""vLLM 0.33.0 on both cards as it is served: verdicts again from their processes, and pages."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from patcher.ab.served_records import ServedProcess, ServedResult
from patcher.ab.served_tuning import rated
from patcher.ab.served_verdict import judge_served
from patcher.bench import content
from patcher.bench.ab.engine_config import Tuning
from patcher.bench.ab.served import arm_orders

RESULTS = Path(__file__).parents[3] / "bench/results"
FOLDERS = {name: RESULTS / f"{name}-vllm-0.33" for name in ("h100", "h200")}
KEPT = {
    name: ServedResult.model_validate_json(content(folder / "served.json.xz"))
    for name, folder in FOLDERS.items()
}
PAGE = (FOLDERS["h200"] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("card", FOLDERS)
def test_its_processes_give_what_it_says_again(card: str) -> None:
    kept = KEPT[card]
    stated, processes = kept.comparison, kept.processes
    if card == "h100":  # joined by hand from two hosts, for each of which the bundles were built
        found = judge_served(kept.header, processes, stated.margin_pct)
        assert found.verdict == "reject"
        others = [each for each in found.reasons if each.startswith("another bundle named ")]
        assert len(others) == len(kept.header.sides[1].patches)
        processes = tuple(map(of_the_first_host, processes))
    assert judge_served(kept.header, processes, stated.margin_pct) == stated
    assert (stated.verdict, stated.process_pairs) == ("accept", 4)


def of_the_first_host(process: ServedProcess) -> ServedProcess:
    """A process whose receipts name the bundles of pairs 0 and 1 by their digests."""
    named = KEPT["h100"].header.sides[1].patches
    receipts = [
        each.model_copy(update={"digest": named.get(each.patch_id, each.digest)})
        for each in process.receipts
    ]
    return process.model_copy(update={"receipts": tuple(receipts)})


def test_a_row_by_itself_gives_what_the_page_says() -> None:
    kept = ServedResult.model_validate_json(content(FOLDERS["h200"] / "row.json.xz"))
    stated = kept.comparison
    assert judge_served(kept.header, kept.processes, stated.margin_pct) == stated
    told = f"**{stated.gain_pct:+.1f} %** [{stated.gain_low_pct:+.1f}, {stated.gain_high_pct:+.1f}]"
    assert stated.verdict == "accept"
    assert told in PAGE
    assert f"{sum(one.took_s for one in kept.processes):.0f} s the four" in PAGE


def test_two_versions_give_what_the_page_says() -> None:
    kept = ServedResult.model_validate_json(content(FOLDERS["h200"] / "engines.json.xz"))
    stated = kept.comparison
    assert judge_served(kept.header, kept.processes, stated.margin_pct) == stated
    assert (stated.verdict, stated.process_pairs) == ("inconclusive", 2)
    assert [side.version for side in kept.header.sides] == ["0.25.1", "0.33.0"]
    assert [one.pair for one in kept.processes] == [0, 0, 1, 1]
    assert f"{stated.gain_pct:.1f} % in the mean" in PAGE
    assert f"[{stated.gain_low_pct:+.1f}, {stated.gain_high_pct:+.1f}]" in PAGE
    rates = {
        (one.pair, one.arm): [run.output_tokens_per_s for run in one.runs] for one in kept.processes
    }
    for index, point in enumerate(stated.points):
        cells = [
            f"{rates[pair, 'baseline'][index]:,.1f}, {rates[pair, 'patched'][index]:,.1f}"
            for pair in (0, 1)
        ]
        gain = f"{point.gain_pct:+.1f} % [{point.gain_low_pct:+.1f}, {point.gain_high_pct:+.1f}]"
        assert f"| {' | '.join(cells)} | {gain} |" in PAGE


def test_no_option_that_was_tried_beats_stock() -> None:
    rates: list[str] = []
    for name in ("fp8", "async"):
        kept = Tuning.model_validate_json(content(FOLDERS["h200"] / f"options-{name}.json.xz"))
        assert kept.chosen == {}
        stock, other = kept.trials
        assert stock.arguments == {}
        rates += [f"{trial.tokens_per_s:,.1f}" for trial in (stock, other)]
    plain, in_fp8, again, without = rates
    assert plain == again
    assert f"stock {plain} output tokens/s; with a KV cache in fp8 {in_fp8}" in PAGE
    assert f"without async scheduling {without}." in PAGE


def test_speculation_with_real_weights_is_as_the_page_says() -> None:
    kept = json.loads(content(FOLDERS["h200"] / "options-ngram.json.xz"))
    stock, ngram = (
        rated(one["arguments"], ServedProcess.model_validate(one["process"]))
        for one in kept["servers"]
    )
    assert stock.arguments == {}
    assert '"num_speculative_tokens": 2' in json.dumps(ngram.arguments)
    assert stock.tokens_per_s is not None
    assert ngram.tokens_per_s is not None
    assert f"stock {stock.tokens_per_s:,.1f} output tokens/s, two tokens speculated" in PAGE
    assert f"{ngram.tokens_per_s:,.1f} (its two rounds {ngram.spread_pct:.0f} % apart)" in PAGE
    assert f"{ngram.tokens_per_s / stock.tokens_per_s:.2f} times" in PAGE


def test_patches_under_speculation_are_as_the_page_says() -> None:
    kept = json.loads(content(FOLDERS["h200"] / "served-ngram.json.xz"))
    for gpu, said in enumerate(kept["results"]):
        result = ServedResult.model_validate(said)
        assert result.comparison.verdict == "inconclusive"
        assert f"{result.comparison.gain_pct:.2f}" in PAGE
        stock, patched = (one.runs[0] for one in result.processes)
        itl = " to ".join(
            f"{run.itl_ms['p50']:.2f}, {run.itl_ms['p99']:.1f}" for run in (stock, patched)
        )
        assert (
            f"| GPU {gpu} | {stock.output_tokens_per_s:,.1f} | {patched.output_tokens_per_s:,.1f} "
            f"| {itl} | {stock.ttft_ms['p50']:.0f} to {patched.ttft_ms['p50']:.0f} |"
        ) in PAGE
        receipts = {one.point: one for one in result.processes[1].receipts}
        [attention] = receipts["vllm:decode_attention"].fallbacks.values()
        assert f"{attention:,}" in PAGE
        assert not receipts["vllm:decode_attention"].calls
        linear = receipts["vllm:linear"]
        assert linear.fallbacks.keys() == {"tokens above 16"}
        left = linear.fallbacks["tokens above 16"]
        assert f"{left:,} of {left + sum(linear.calls.values()):,}" in PAGE
        for point in ("vllm:add_norm", "vllm:rope_kv"):
            assert receipts[point].calls
            assert not receipts[point].fallbacks


def test_the_blocks_step_by_its_ledger_is_as_the_page_says() -> None:
    kept = json.loads(content(FOLDERS["h200"] / "ledger-blocks.json.xz"))["ledger"]
    roles = {one["role"]: one for one in kept["roles"]}
    assert f"**{kept['launches']:.0f} launches a step**" in PAGE
    kernels = sum(one["measured_ns"] for one in roles.values() if one["launches"])
    assert f"Of {kernels / 1e3:,.0f} us of kernels" in PAGE
    for role, said in (
        ("experts", "the MoE block takes"),
        ("matmuls", "projections and head"),
        ("attention", "attention"),
    ):
        of = roles[role]
        floor = f"{'floor ' if role == 'experts' else ''}{of['floor_ns'] / 1e3:,.0f}"
        assert f"{said} {of['measured_ns'] / 1e3:,.0f} ({floor})" in PAGE
    assert f"waits {roles['idle']['measured_ns'] / 1e3:,.0f} us a step" in PAGE


@pytest.mark.parametrize("card", FOLDERS)
def test_arms_took_turns_and_a_pair_has_one_machine(card: str) -> None:
    processes = KEPT[card].processes
    assert sorted((one.pair, one.arm) for one in processes) == sorted(arm_orders(4))
    for pair in range(4):
        assert len({one.machine for one in processes if one.pair == pair}) == 1


@pytest.mark.parametrize("card", FOLDERS)
def test_pages_have_its_figures(card: str) -> None:
    page = (FOLDERS[card] / "README.md").read_text(encoding="utf-8")
    front = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    [row] = [line for line in front.splitlines() if line.startswith(f"| [{card.upper()}]")]
    for gain in (KEPT[card].comparison, *KEPT[card].comparison.points):
        told = f"{gain.gain_pct:+.1f} %"
        if gain.gain_low_pct > 0:
            told = f"**{told}**"
        told = f"| {told} [{gain.gain_low_pct:+.1f}, {gain.gain_high_pct:+.1f}] |"
        assert told in page
        assert told in row


def test_the_page_has_both_rates_of_each_pair() -> None:
    rates: dict[int, dict[str, list[float]]] = {}
    for one in KEPT["h200"].processes:
        rates.setdefault(one.pair, {})[one.arm] = [run.output_tokens_per_s for run in one.runs]
    for index in range(4):
        cells = [
            f"{arms['baseline'][index]:,.1f}, {arms['patched'][index]:,.1f}"
            for _, arms in sorted(rates.items())
        ]
        assert f"| {' | '.join(cells)} |" in PAGE


def test_real_weights_are_as_the_page_says() -> None:
    [first, *_] = json.loads(content(FOLDERS["h200"] / "real-weights-smollm2.json.xz"))["measured"]
    windows = first["throughput"]["windows"]

    def medians(kind: str, key: str, steps: int) -> str:
        """Of stock's processes, then of the patched ones."""
        arms = [
            [
                f"{1000 * statistics.median(own) / steps:.{1 if steps == 1 else 2}f}"
                for process in sorted({one["process"] for one in windows if one["kind"] == kind})
                if (
                    own := [
                        one[key]
                        for one in windows
                        if (one["kind"], one["process"], one["arm"]) == (kind, process, arm)
                    ]
                )
            ]
            for arm in ("baseline", "patched")
        ]
        return (" | " if kind == "ab" else ", ").join(", ".join(each) for each in arms)

    for title, key, steps in (
        ("prefill of 4,096 tokens", "prefill_s", 1),
        ("a step", "decode_s", 63),
    ):
        told = f"{medians('ab', key, steps)} | {medians('aa', key, steps)}"
        assert f"| {title}, ms | {told} |" in PAGE
    gain, control = (first["throughput"][name] for name in ("comparison", "control"))
    for one, shown in (
        (gain, "**{:+.1f} %** [{:+.1f}, {:+.1f}]"),
        (control, "{:+.1f} % [{:+.1f}, {:+.1f}]"),
    ):
        assert shown.format(one["gain_pct"], one["gain_low_pct"], one["gain_high_pct"]) in PAGE


def test_windows_beside_others_are_as_the_page_says() -> None:
    rows = json.loads(content(FOLDERS["h200"] / "beside.json.xz"))
    whats = ("12 alone, half", "12 alone, later", "12 beside a CUDA", "12 alone again")
    for at, what in enumerate(whats):
        group = rows[12 * at : 12 * at + 12]
        steps = [row["step_ms"] for row in group]
        switches = [row["voluntary"] for row in group]
        watts = [row["clocks"]["power_w"] for row in group]
        assert {row["clocks"]["sm_mhz"] for row in group} == {1980}
        assert re.search(
            rf"\| {what}[^|]*\| {min(steps):.3f} to {max(steps):.3f} "
            rf"\| {min(switches):,} to {max(switches):,} "
            rf"\| {min(watts):.0f} to {max(watts):.0f} \|",
            PAGE,
        )


def test_steps_at_batch_1_are_as_the_page_says() -> None:
    rows = json.loads(content(FOLDERS["h200"] / "host.json.xz"))
    for arm, title in (("stock", "stock"), ("patched", "eight patches")):
        cells = []
        for core in ("in-process", "own-process"):
            steps = [row["step_ms"] for row in rows[f"{arm}-{core}"][1:]]
            cells.append(f"{statistics.median(steps):.3f} ({min(steps):.3f} to {max(steps):.3f})")
        assert f"| {title} | {cells[0]} | {cells[1]} |" in PAGE


def test_ledgers_are_as_the_page_says() -> None:
    kept = json.loads(content(FOLDERS["h200"] / "ledger-qwen3-30b-a3b-fp8.json.xz"))
    ledgers = [one["profile"]["ledger"] for one in kept["profiles"]]
    whole = " | ".join(
        f"**{x['step_ns'] / 1e3:,.0f}** | **{x['floor_ns'] / 1e3:,.0f}**" for x in ledgers
    )
    shares = [f"{each['sol_pct']:.0f}" for each in ledgers]
    assert f"| **step**, at {shares[0]}, {shares[1]} and {shares[2]} % of light | {whole} |" in PAGE
    for role in ledgers[0]["roles"]:
        if role["role"] in ("idle", "copies"):
            continue
        cells = []
        for ledger in ledgers:
            [own] = [each for each in ledger["roles"] if each["role"] == role["role"]]
            cells += [own["measured_ns"], own["floor_ns"]]
        said = " | ".join(f"{cell / 1e3:,.0f}" for cell in cells)
        assert f"| {role['title']} | {said} |" in PAGE
    dense = json.loads(content(FOLDERS["h200"] / "ledger-qwen3-8b.64.json.xz"))["ledger"]
    assert (
        f"{dense['step_ns'] / 1e3:,.0f} us a step of a floor of {dense['floor_ns'] / 1e3:,.0f}"
        in PAGE
    )
    assert f"**{dense['sol_pct']:.0f} % of light**" in PAGE
