"""Statistics, clocks, the end-to-end A/B, quality, and the rule that decides."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from measure_sample import (
    TINY,
    WORKLOAD,
    FakeNvml,
    ScriptedEngine,
    comparison,
    decided,
    evidence,
)

from patcher import bench
from patcher.bench import (
    Evaluation,
    Outcome,
    Sample,
    Throughput,
)
from patcher.bench.ab.engine_config import ConfigTrial, Tuning
from patcher.bench.ab.quality import assess, greedy_identical
from patcher.bench.ab.throughput import compare_in_one_process
from patcher.bench.ab.windows import turn_lengths
from patcher.bench.engines import open_engine
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.compare import compare, look_confidences, pairs_needed, read_samples
from patcher.integrate import Receipt


def samples(gain_pct: float, sd_pct: float, pairs: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)
    found = []
    for pair in range(pairs):
        level = 1000 * (1 + rng.gauss(0, 0.01))
        factor = 1 + rng.gauss(gain_pct, sd_pct) / 100
        found.append(Sample(pair=pair, arm="baseline", tokens_per_s=level))
        found.append(Sample(pair=pair, arm="patched", tokens_per_s=level * factor))
    return found


def verdicts(gain_pct: float, runs: int) -> dict[str, int]:
    counts = {"accept": 0, "reject": 0, "inconclusive": 0}
    for seed in range(runs):
        counts[compare(samples(gain_pct, 0.5, 21, seed)).verdict] += 1
    return counts


def test_verdicts_on_synthetic_noise() -> None:
    """Pair SD 0.5 %, 20 pairs, margin 0.5 %: the seeds are fixed, so are the counts."""
    assert verdicts(0.0, 400)["accept"] == 0
    assert verdicts(-1.0, 200)["accept"] == 0
    assert verdicts(1.0, 200)["accept"] >= 180


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(500):
        found = compare(samples(2.0, 1.0, 13, seed))
        inside += found.gain_low_pct <= 2.0 <= found.gain_high_pct
    assert 460 <= inside <= 490


def test_one_wild_pair_does_not_make_a_gain() -> None:
    wild = samples(0.0, 0.1, 13, 1)
    wild[9] = wild[9].model_copy(update={"tokens_per_s": wild[9].tokens_per_s * 3})
    assert compare(wild).verdict != "accept"


def test_too_few_pairs_say_so() -> None:
    found = compare(samples(5.0, 0.1, 5, 0))
    assert found.verdict == "inconclusive"
    assert "too few" in found.reason
    with pytest.raises(bench.UsageError, match="no usable pair"):
        compare(samples(5.0, 0.1, 1, 0))


def test_an_inconclusive_verdict_says_how_many_pairs_would_tell() -> None:
    found = compare(samples(0.7, 1.0, 10, 3))
    assert found.verdict == "inconclusive"
    assert "pairs would tell" in found.reason
    assert pairs_needed(0.5, 1.0) is not None
    assert pairs_needed(2.0, 1.0) > pairs_needed(0.5, 1.0)  # type: ignore[operator]
    assert pairs_needed(1.0, 0.5) is None


def test_broken_pairs_are_refused() -> None:
    good = samples(0, 0.1, 3, 0)
    with pytest.raises(bench.UsageError, match="has only baseline"):
        compare(good[:-1])
    with pytest.raises(bench.UsageError, match="twice"):
        compare([*good, good[0]])


def test_looks_spend_no_more_than_the_whole_alpha() -> None:
    levels = look_confidences(3)
    assert levels == sorted(levels, reverse=True)  # early looks ask for more
    assert sum(100 - level for level in levels) == pytest.approx(5.0)
    assert look_confidences(1) == [pytest.approx(95.0)]


@pytest.mark.parametrize(
    "text", ["", "{}", "not json", '{"pair": 0, "arm": "both", "tokens_per_s": 1}', "[1]\n"]
)
def test_bad_samples_name_their_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "samples.jsonl"
    good = '{"pair": 0, "arm": "baseline", "tokens_per_s": 1.0}\n'
    file.write_text(good + text if text else "")
    with pytest.raises(bench.UsageError, match="line 2" if text else "no samples"):
        read_samples(file)


def test_clocks_are_locked_and_restored_also_after_an_error() -> None:
    nvml = FakeNvml()

    def fail_while_locked() -> None:
        with ClockMonitor("cuda", lock_mhz=1500, nvml=nvml) as clocks:
            assert clocks.sample().sm_mhz == 1500
            assert clocks.description.startswith("locked at 1500 MHz")
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail_while_locked()
    assert nvml.locked is None
    assert nvml.restored == 1


def test_a_refused_lock_is_monitoring_and_says_so() -> None:
    with ClockMonitor("cuda", lock_mhz=1500, nvml=FakeNvml(refuse=True)) as clocks:
        clocks.sample()
    assert clocks.description.startswith("monitored")
    assert "refused: Insufficient Permissions" in clocks.description


def test_a_clock_that_cannot_be_held_is_an_error_and_restored() -> None:
    nvml = FakeNvml(ceiling=1200)
    with pytest.raises(bench.VerificationError), ClockMonitor("cuda", lock_mhz=1500, nvml=nvml):
        pass
    assert nvml.locked is None


def test_nvml_that_dies_does_not_end_the_measurement() -> None:
    nvml = FakeNvml()
    with ClockMonitor("cuda", nvml=nvml) as clocks:
        assert clocks.sample().sm_mhz == 1980
        nvml.dead = True
        assert clocks.sample().sm_mhz is None
        assert "GPU is lost" in clocks.description
    assert ClockMonitor("cpu").description == "monitored: CPU, no clock control"


def run(engine: ScriptedEngine, clocks: ClockMonitor | None = None, pairs: int = 12) -> Throughput:
    return compare_in_one_process(
        engine,
        {"baseline": nullcontext, "patched": engine.patch},
        WORKLOAD,
        margin_pct=0.5,
        max_pairs=pairs,
        looks=2,
        patch_id="p",
        clocks=clocks or ClockMonitor("cpu"),
    )


@pytest.mark.parametrize(("gain", "verdict"), [(3.0, "accept"), (0.0, "reject"), (-2.0, "reject")])
def test_a_known_gain_is_found(gain: float, verdict: str) -> None:
    found = run(ScriptedEngine(gain))
    assert found.comparison.verdict == verdict
    assert found.comparison.gain_pct == pytest.approx(gain, abs=0.2)
    assert found.control is not None
    assert found.control.verdict != "accept"
    assert abs(found.control.gain_pct) < 0.2


def test_pairs_share_prompts_and_no_two_pairs_do() -> None:
    engine = ScriptedEngine(3.0)
    found = run(engine)
    asked = engine.seen[2:]  # the first two are the arms' warm-up
    by_seed: dict[int, list[bool]] = {}
    for seed, patched in asked:
        by_seed.setdefault(seed, []).append(patched)
    assert all(len(sides) == 2 for sides in by_seed.values())
    kinds = {sorted(sides)[1] for sides in by_seed.values()}
    assert kinds == {True, False}  # A/B pairs, and A/A pairs with the baseline on both sides
    orders = [tuple(sides) for sides in by_seed.values() if any(sides)]
    assert {(True, False), (False, True)} == set(orders)
    assert found.comparison.dropped_pairs == 1
    timed = WORKLOAD.output_len - len(turn_lengths(WORKLOAD))
    assert {window.tokens for window in found.windows} == {2 * timed}


def test_turns_cover_every_step() -> None:
    for steps in (1, 7, 8, 15, 16, 48, 50, 64, 100):
        for device in ("cpu", "cuda"):
            load = WORKLOAD.model_copy(update={"output_len": steps, "device": device})
            assert sum(turn_lengths(load)) == steps
    assert turn_lengths(WORKLOAD.model_copy(update={"output_len": 20})) == [8, 12]
    assert turn_lengths(load) == [100]


@pytest.mark.parametrize(
    "engine", [ScriptedEngine(3.0, short=1), ScriptedEngine(3.0, bad_token=True)]
)
def test_tokens_are_counted_by_the_caller(engine: ScriptedEngine) -> None:
    with pytest.raises(bench.PatcherError, match="the engine gave"):
        run(engine)


def test_throttled_pairs_are_dropped_and_counted() -> None:
    nvml = FakeNvml()

    class Throttling(ClockMonitor):
        def sample(self) -> Any:
            nvml.bits = 0x4 if len(self._seen) in (3, 4) else 0
            return super().sample()

    with Throttling("cuda", nvml=nvml) as clocks:
        found = run(ScriptedEngine(3.0), clocks)
    dropped = {window.pair for window in found.windows if window.throttle_reasons}
    assert len(dropped) == 2
    assert found.comparison.dropped_pairs >= 2


def test_quality_passes_the_identity_and_fails_a_damaged_model() -> None:
    engine = open_engine(TINY)
    before = engine.generate(engine.prompts(1), 6).tokens

    @contextmanager
    def damage() -> Any:
        norm: Any = engine.model.get_submodule("model.layers.2.input_layernorm")
        kept = norm.weight.data.clone()
        norm.weight.data *= 1.001
        try:
            yield
        finally:
            norm.weight.data = kept

    same = assess(engine, {"baseline": nullcontext, "patched": nullcontext}, 1, 6)
    assert same.passed
    assert same.greedy_agreement_pct == 100
    assert same.patched_rmse == same.baseline_rmse
    hurt = assess(engine, {"baseline": nullcontext, "patched": damage}, 1, 6)
    assert not hurt.passed
    assert "rmse" in hurt.reason
    assert greedy_identical(engine, before, engine.prompts(1), 6)
    assert not greedy_identical(engine, before + 1, engine.prompts(1), 6)


def in_another_configuration(rate: float | None) -> Throughput:
    """The patched arm runs with flags of its own, which gave this by themselves."""
    own = {"moe_backend": "triton"}
    trials = [ConfigTrial(arguments={"moe_backend": "b"}, tokens_per_s=100.0, spread_pct=0.1)]
    if rate is not None:
        trials.append(ConfigTrial(arguments=own, tokens_per_s=rate, spread_pct=0.1))
    tuning = Tuning(trials=tuple(trials), chosen={"moe_backend": "b"})
    throughput: Throughput = evidence()["throughput"]
    return throughput.model_copy(update={"patched_arguments": own, "tuning": tuning})


NEVER = Receipt(patch_id="p", digest="d", pid=1, calls={}, fallbacks={"dtype": 5})
WRONG = Evaluation(op="op", language="cpp", digest="d", outcome=Outcome.MISMATCH)


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "accept", "+3.00 % tokens/s"),
        ({"verdict": "reject"}, "reject", "because"),
        ({"verdict": "inconclusive"}, "inconclusive", "because"),
        ({"receipt": NEVER}, "reject", "never ran in the patched windows"),
        ({"quality_receipt": NEVER}, "reject", "never ran in the quality run"),
        ({"same_model": False}, "reject", "no longer the same model"),
        ({"reverted_identical": False}, "reject", "after the revert"),
        ({"evaluation": WRONG}, "reject", "mismatch, not correct"),
        ({"control": comparison("accept", 2.0)}, "inconclusive", "A/A control"),
        ({"control": None}, "inconclusive", "no A/A control"),
        (
            {"throughput": in_another_configuration(99.0)},
            "accept",
            "the patched arm runs with moe_backend=triton, which alone is no faster",
        ),
        ({"throughput": in_another_configuration(101.0)}, "inconclusive", "no trial shows"),
        ({"throughput": in_another_configuration(None)}, "inconclusive", "no trial shows"),
        (
            {
                "throughput": in_another_configuration(99.0).model_copy(update={"tuning": None}),
            },
            "inconclusive",
            "no trial shows",
        ),
    ],
)
def test_the_rule_accepts_only_on_every_evidence(
    changes: dict[str, Any], verdict: str, reason: str
) -> None:
    decision = decided(**evidence(**changes))
    assert decision.verdict == verdict
    assert any(reason in line for line in decision.reasons)
