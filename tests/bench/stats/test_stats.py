"""Statistics on noise that is not kind, at looks, and on numbers at the edge."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from patcher import bench
from patcher.bench import Sample, Window
from patcher.bench.stats.adjust import FAR_OUT, winsorised, without_order
from patcher.bench.stats.compare import (
    compare,
    holm,
    judge,
    look_confidences,
    pairs_needed,
    read_samples,
)
from patcher.bench.stats.intervals import MIN_PAIRS, first_decided, mean_of, schedule


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
    """At the margin itself an accept is false: 2.5 % of sessions at most, however often we look."""
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
    assert accepted >= 0.88 * 300
    assert pairs_needed(0.001, 5.0) == MIN_PAIRS
    assert pairs_needed(0.0, 1.0) == MIN_PAIRS
    assert pairs_needed(0.5, 0.0) == needed
    alike = pairs_needed(0.5, 1.0, rho=0.6)
    assert alike is not None
    assert alike == 4 * needed


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
        '{"pair": 0, "arm": "patched", "tokens_per_s": 1, "process": -1}',
        '{"pair": 0, "arm": "patched", "tokens_per_s": 1, "process": "one"}',
        '{"pair": 0, "arm": "patched", "tokens_per_s": 1, "swapped": 3}',
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


def over_processes(
    process_gains_pct: list[float], pairs_each: int = 8, noise_pct: float = 0.05, swap: bool = True
) -> list[Sample]:
    """Process pairs one after another, each with a gain of its own."""
    rng = random.Random(11)
    ratios = [
        1 + rng.gauss(gain, noise_pct) / 100
        for gain in process_gains_pct
        for _ in range(pairs_each)
    ]
    return [
        sample.model_copy(
            update={
                "process": sample.pair // pairs_each,
                "swapped": swap and bool(sample.pair // pairs_each % 2),
            }
        )
        for sample in pairs(ratios)
    ]


def test_the_process_is_a_random_effect() -> None:
    """Three process pairs with +0.9, +0.5 and +1.3 %: many pairs in each, and still only three."""
    gains = [0.9, 0.5, 1.3]
    alone = compare(s.model_copy(update={"process": None}) for s in over_processes(gains))
    found = compare(over_processes(gains), margin_pct=0.0)
    assert alone.process_pairs == 0
    assert found.process_pairs == 3
    assert found.block_pairs == 0
    assert found.pairs == 21  # the first pair of each is warm-up
    assert found.dropped_pairs == 3
    assert found.gain_pct == pytest.approx(0.9, abs=0.05)
    half = 4.303 * 0.4 / math.sqrt(3)  # t with two degrees of freedom
    assert found.gain_high_pct - found.gain_pct == pytest.approx(half, rel=0.1)
    assert found.verdict == "inconclusive"
    assert "only more process pairs would tell" in found.reason
    assert alone.gain_low_pct > 0


def test_processes_that_agree_by_luck_do_not_narrow_the_interval() -> None:
    """Three equal process means say less than the pairs in them do."""
    noise = [1.0, -1.0, 0.5, -0.5] * 2
    samples = pairs([1 + (1.0 + x) / 100 for _ in range(3) for x in noise])
    named = [s.model_copy(update={"process": s.pair // 8}) for s in samples]
    apart = compare(samples, warmup_pairs=0)
    together = compare(named, warmup_pairs=0)
    assert together.gain_low_pct == pytest.approx(apart.gain_low_pct)


def test_each_process_pair_counts_once() -> None:
    samples = [s for s in over_processes([0.0, 0.0, 3.0], 8) if s.pair < 19]
    assert compare(samples).gain_pct == pytest.approx(1.0, abs=0.1)


def test_fewer_than_three_process_pairs_say_what_they_cannot_average_out() -> None:
    one = compare(over_processes([2.0], 20))
    two = compare(over_processes([2.0, 2.1], 10))
    assert (one.verdict, one.process_pairs) == ("accept", 1)
    assert "1 process pair: what two processes differ by" in one.reason
    assert "2 process pairs: what two processes differ by" in two.reason
    three = compare(over_processes([2.0, 2.1, 1.9]))
    assert "not averaged out" not in three.reason
    assert "over 3 process pairs" in three.reason
    stuck = compare(over_processes([2.0, 2.1, 1.9], swap=False))
    assert "arms never swapped" in stuck.reason
    unnamed = compare(s.model_copy(update={"process": None}) for s in over_processes([2.0]))
    assert "process" not in unnamed.reason


def test_processes_that_do_not_fit_are_refused() -> None:
    good = over_processes([1.0, 1.0])
    with pytest.raises(bench.UsageError, match="samples of pair 0 name two process pairs"):
        compare([good[0].model_copy(update={"process": 1}), *good[1:]])
    nameless = [s.model_copy(update={"process": None}) if s.pair == 3 else s for s in good]
    with pytest.raises(bench.UsageError, match="only one names its process"):
        compare(nameless)


def test_the_process_field_is_read(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    written = over_processes([1.0, 1.0, 1.0])
    file.write_text("\n".join(sample.model_dump_json(exclude_none=True) for sample in written))
    assert compare(read_samples(file)).process_pairs == 3


def test_neighbours_that_resemble_each_other_widen_the_interval() -> None:
    rng = random.Random(2)
    independent = [rng.gauss(0, 0.005) for _ in range(64)]
    alike = [independent[i // 8 * 8] for i in range(64)]  # eight values, each eight times
    apart, together = mean_of(independent).widest(95), mean_of(alike).widest(95)
    assert together[0] > 2 * apart[0]
    assert together[1] is not None
    assert together[1].block == 8
    assert compare(pairs([math.exp(x) for x in alike]), warmup_pairs=0).block_pairs == 8


def test_an_accept_is_a_small_p_value() -> None:
    rng = random.Random(9)
    for _ in range(200):
        shift = rng.uniform(0.004, 0.008)
        ratios = [rng.gauss(shift, 0.003) for _ in range(rng.randint(12, 40))]
        found = judge(ratios, confidence_pct=90)
        assert (found.low_pct > 0.5) == (found.p_value < 0.05)
    assert judge([0.01] * 8).p_value == 0
    assert judge([0.0] * 8).p_value == 1
    assert judge([0.01]).p_value == 1


def test_holm_keeps_what_holds_among_all() -> None:
    """p 0.001, 0.011 and 0.02, each accepted alone at 0.025: 3 and 2 of them are asked in turn."""
    accepted = compare(pairs([1.02] * 3 + [1.021] * 9))
    tried = [accepted.model_copy(update={"p_value": p}) for p in (0.011, 0.02, 0.001)]
    first, second, third = holm(tried)
    assert [one.p_holm for one in (first, second, third)] == pytest.approx([0.022, 0.022, 0.003])
    assert {one.verdict for one in (first, second, third)} == {"accept"}
    more = holm([*tried, *(accepted.model_copy(update={"p_value": 0.5, "verdict": "reject"}),) * 3])
    assert [one.verdict for one in more] == [
        "inconclusive",
        "inconclusive",
        "accept",
        *["reject"] * 3,
    ]
    assert more[1].p_holm is not None
    assert "not among 6 patches" in more[1].reason
    assert holm([accepted]) == [accepted.model_copy(update={"p_holm": accepted.p_value})]
    with pytest.raises(bench.UsageError, match="without a p-value"):
        holm([accepted.model_copy(update={"p_value": None})])


def test_holm_pays_for_the_look_that_decided() -> None:
    """A look that had a fifth of alpha counts five times."""
    early = compare(pairs([1.02] * 3 + [1.021] * 9), confidence_pct=99)
    found = holm([early.model_copy(update={"p_value": 0.004})])
    assert found[0].p_holm == pytest.approx(0.02)
    assert found[0].verdict == "accept"


def test_looks_are_taken_until_one_decides() -> None:
    looks = schedule(20, 3)
    assert [look.taken for look in looks] == [8, 14, 22]
    assert [look.confidence_pct for look in looks] == look_confidences(3)
    seen: list[int] = []

    def at(verdicts: list[str | None]) -> object:
        seen.clear()

        def one(look: object) -> object:
            seen.append(1)
            verdict = verdicts[len(seen) - 1]
            return verdict and accepted.model_copy(update={"verdict": verdict})

        return first_decided(looks, one)  # type: ignore[arg-type,type-var]

    accepted = compare(pairs([1.02] * 12))
    assert at(["inconclusive", "accept", "reject"]) == accepted
    assert len(seen) == 2
    assert at(["inconclusive", None, None]) is None
    assert len(seen) == 3


def test_a_stall_of_either_arm_counts_as_if_it_were_short_and_is_told() -> None:
    rng = random.Random(3)
    quiet = [math.exp(0.01 + rng.gauss(0, 0.002)) for _ in range(40)]
    for factor in (0.93, 1 / 0.93):  # which arm stood still
        struck = [one * (factor if index in (7, 23) else 1) for index, one in enumerate(quiet)]
        found = compare(pairs(struck))
        assert (found.verdict, found.outlying_pairs) == ("accept", 2)
        assert "2 outlier pairs were winsorised" in found.reason
        assert found.gain_pct == pytest.approx(compare(pairs(quiet)).gain_pct, abs=0.06)
        assert found.pair_sd_pct > 1.2, "the SD is of all pairs as they are"
    assert compare(pairs(quiet)).outlying_pairs == 0


def test_far_out_is_four_standard_deviations_of_normal_values() -> None:
    rng = random.Random(8)
    values = [rng.gauss(1, 2) for _ in range(2000)]
    moved, count = winsorised([*values, 100.0, -100.0])
    assert count >= 2
    assert max(moved) == pytest.approx(1 + FAR_OUT * 2, rel=0.05)
    assert min(moved) == pytest.approx(1 - FAR_OUT * 2, rel=0.05)
    assert winsorised([0.0] * 9 + [5.0]) == ([0.0] * 9 + [5.0], 0)
    assert winsorised([3.0]) == ([3.0], 0)


def test_what_process_pairs_differ_by_is_no_stall() -> None:
    rng = random.Random(4)
    values = [0.03 * (index // 8) + rng.gauss(0, 0.001) for index in range(24)]
    owner = [index // 8 for index in range(24)]
    assert winsorised(values, owner) == (values, 0)
    values[3] += 0.07
    moved, count = winsorised(values, owner)
    assert (count, moved[4:]) == (1, values[4:])
    assert moved[3] < 0.01


def in_order(ratios: list[float], patched_first: list[bool]) -> list[Window]:
    """The windows of such pairs, the arm that began first."""
    both = [
        Window(
            pair=one.pair,
            arm=one.arm,
            kind="ab",
            tokens=1000,
            decode_s=1000 / one.tokens_per_s,
            prefill_s=0.1,
        )
        for one in pairs(ratios)
    ]
    return [
        window
        for index, first in enumerate(patched_first)
        for window in both[2 * index : 2 * index + 2][:: -1 if first else 1]
    ]


def test_what_beginning_a_pair_does_is_found_and_taken_out() -> None:
    rng = random.Random(6)
    first = [index % 4 in (0, 3) for index in range(25)]
    quiet = [math.exp(0.01 + rng.gauss(0, 0.001)) for _ in first]
    slowed = [
        one * math.exp(-0.007 if begins else 0.007)
        for one, begins in zip(quiet, first, strict=True)
    ]
    plain, found = compare(in_order(quiet, first)), compare(in_order(slowed, first))
    assert found.order_effect_pct == pytest.approx(-0.7, abs=0.05)
    assert plain.order_effect_pct == pytest.approx(0, abs=0.05)
    assert found.gain_pct == pytest.approx(plain.gain_pct, abs=0.001)
    assert found.pair_sd_pct == pytest.approx(plain.pair_sd_pct, abs=0.01)
    assert (found.verdict, plain.verdict) == ("accept", "accept")
    one_order = compare(in_order(slowed, [False] * len(slowed)))
    assert one_order.order_effect_pct is None, "nothing to tell it by"
    assert one_order.pair_sd_pct > 0.6


def test_the_lines_of_a_file_say_nothing_of_who_began() -> None:
    """Sorted by speed they would be an order effect that takes all spread out."""
    rng = random.Random(12)
    samples = pairs([math.exp(rng.gauss(0.006, 0.005)) for _ in range(12)])
    by_speed = sorted(samples, key=lambda one: (one.pair, one.tokens_per_s))
    assert compare(by_speed) == compare(samples)
    assert compare(samples).order_effect_pct is None


def test_an_odd_number_of_pairs_does_not_lean_to_the_arm_that_begins_less() -> None:
    first = [True, False, True, True, False, True, True, False, True]
    ratios = [-0.007 if begins else 0.007 for begins in first]
    owner = [index // 3 for index in range(9)]
    found = without_order(ratios, first, owner)
    assert found.effect == pytest.approx(-0.007)
    assert found.ratios == pytest.approx([0.0] * 9)


def test_what_process_pairs_differ_by_is_no_effect_of_order() -> None:
    """Each has one order only, as where the arms run one after the other."""
    first, owner = [True] * 4 + [False] * 4, [0] * 4 + [1] * 4
    ratios = [0.01] * 4 + [-0.01] * 4
    assert without_order(ratios, first, owner) == (ratios, None)
    mixed = without_order([0.01, 0.01, -0.01, -0.01], [True, False] * 2, [0, 0, 1, 1])
    assert mixed.effect == 0


def test_a_stall_does_not_move_the_order_effect() -> None:
    rng = random.Random(9)
    first = [index % 2 == 0 for index in range(12)]
    ratios = [rng.gauss(-0.003 if begins else 0.003, 0.0003) for begins in first]
    ratios[4] += 0.08
    effect = without_order(ratios, first).effect
    assert effect == pytest.approx(-0.003, abs=0.0004)


def test_the_order_effect_costs_a_degree_of_freedom_but_not_in_whole_blocks() -> None:
    values = [0.01, 0.012, 0.009, 0.011, 0.013, 0.008]
    [free], [paid] = mean_of(values).spreads, mean_of(values, ordered=True).spreads
    assert (free.degrees, paid.degrees) == (5, 4)
    assert paid.error == pytest.approx(free.error * math.sqrt(5 / 4))
    blocks = mean_of(values * 3, ordered=True).spreads
    assert [(spread.block, spread.degrees) for spread in blocks] == [(1, 16), (2, 8)]
