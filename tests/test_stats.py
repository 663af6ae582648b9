"""Statistics on noise that is not kind, at looks, and on numbers at the edge."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

import bench
from bench import Sample
from bench.stats import MIN_PAIRS, compare, look_confidences, pairs_needed, read_samples


def pairs(ratios: list[float]) -> list[Sample]:
    return [
        Sample(pair=pair, arm=arm, tokens_per_s=1000.0 * (ratio if arm == "patched" else 1.0))
        for pair, ratio in enumerate(ratios)
        for arm in ("baseline", "patched")
    ]


def noise(kind: str, rng: random.Random, count: int) -> list[float]:
    """Log-ratios of an A/A with a standard deviation of about 0.5 %."""
    found = [rng.gauss(0, 0.005) for _ in range(count)]
    if kind == "heavy":
        return [0.005 * math.tan(math.pi * (rng.random() - 0.5)) / 2 for _ in found]
    if kind == "spikes":
        return [value + (0.05 if rng.random() < 0.05 else 0.0) for value in found]
    if kind == "drift":
        return [value + 0.002 * (i / count - 0.5) for i, value in enumerate(found)]
    return found


@pytest.mark.parametrize("kind", ["normal", "heavy", "spikes", "drift"])
def test_an_a_a_is_accepted_at_most_once_in_a_hundred(kind: str) -> None:
    rng = random.Random(17)
    accepted = sum(
        compare(pairs([math.exp(value) for value in noise(kind, rng, 21)])).verdict == "accept"
        for _ in range(400)
    )
    assert accepted <= 4


def test_looking_three_times_is_paid_for() -> None:
    """At the margin itself an accept is false: 2.5 % of sittings at most, however often we look."""
    rng = random.Random(5)
    levels = look_confidences(3)
    spent = naive = 0
    for _ in range(400):
        ratios = pairs([1.005 * math.exp(rng.gauss(0, 0.005)) for _ in range(31)])
        looks = [ratios[: 2 * (1 + 10 * (look + 1))] for look in range(3)]
        spent += any(
            compare(taken, confidence_pct=level).verdict == "accept"
            for taken, level in zip(looks, levels, strict=True)
        )
        naive += any(compare(taken).verdict == "accept" for taken in looks)
    assert spent <= 0.025 * 400
    assert naive > spent


def test_a_few_wild_pairs_cannot_bring_about_an_accept() -> None:
    """Half of the pairs gain 20 %, half nothing: the mean clears the margin, the sign does not."""
    ratios = [1.0, *[1.2, 1.0] * 10]
    found = compare(pairs(ratios))
    assert found.gain_low_pct > found.margin_pct
    assert found.verdict == "inconclusive"
    assert "only 10 of 20 pairs" in found.reason


def test_pairs_needed_is_what_the_verdict_needs() -> None:
    needed = pairs_needed(0.5, 1.0)
    assert needed is not None
    rng = random.Random(3)
    accepted = sum(
        compare(pairs([1.01 * math.exp(rng.gauss(0, 0.005)) for _ in range(needed + 1)])).verdict
        == "accept"
        for _ in range(300)
    )
    assert accepted >= 0.85 * 300
    assert pairs_needed(0.001, 5.0) == MIN_PAIRS


def test_the_verdict_is_about_the_margin_not_about_zero() -> None:
    small = pairs([1.002 + 0.0001 * (i % 3) for i in range(13)])
    assert compare(small).verdict == "reject"
    assert compare(small, margin_pct=0.0).verdict == "accept"
    assert compare(small, margin_pct=0.1).gain_pct == pytest.approx(0.21, abs=0.01)


def test_warm_up_and_dropped_pairs_are_left_out_and_counted() -> None:
    ratios = [5.0, *[1.02] * 6, 0.1, *[1.02] * 3]
    found = compare(pairs(ratios), dropped_pairs=frozenset({7}))
    assert (found.pairs, found.dropped_pairs) == (9, 2)
    assert found.gain_pct == pytest.approx(2.0)
    assert compare(pairs(ratios), warmup_pairs=0).dropped_pairs == 0


@pytest.mark.parametrize("extreme", [5e-324, 1.7e308])
def test_extreme_rates_stay_numbers(extreme: float) -> None:
    samples = pairs([1.0] * 8)
    samples[-1] = samples[-1].model_copy(update={"tokens_per_s": extreme})
    found = compare(samples)
    assert found.verdict == "inconclusive"
    again = bench.Comparison.model_validate_json(found.model_dump_json())
    assert again == found


@pytest.mark.parametrize(
    ("margin", "confidence"), [(math.nan, 95), (math.inf, 95), (-100, 95), (0.5, 0), (0.5, 100)]
)
def test_a_margin_or_level_that_means_nothing_is_refused(margin: float, confidence: float) -> None:
    with pytest.raises(bench.UsageError):
        compare(pairs([1.0] * 8), margin_pct=margin, confidence_pct=confidence)


@pytest.mark.parametrize(
    "line",
    [
        '{"pair": 0, "arm": "patched", "tokens_per_s": NaN}',
        '{"pair": 0, "arm": "patched", "tokens_per_s": 0}',
        '{"pair": -1, "arm": "patched", "tokens_per_s": 1}',
        '{"pair": 0, "arm": "patched", "tokens_per_s": 1, "more": 1}',
        '{"pair": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_a_hostile_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('\n{"pair": 0, "arm": "baseline", "tokens_per_s": 1.0}\n' + line + "\n")
    with pytest.raises(bench.UsageError, match="line 3") as caught:
        read_samples(file)
    assert "tokens_per_s" in caught.value.hint


def test_what_is_no_text_file_is_a_usage_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (binary, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(bench.UsageError):
            read_samples(path)


def test_samples_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    written = pairs([1.0, 1.03, 1.02])
    file.write_text("\n".join(sample.model_dump_json() for sample in written))
    assert read_samples(file) == written
