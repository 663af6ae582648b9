"""Statistics, clocks, the end-to-end A/B, quality, and the rule that decides."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from patcher import bench
from patcher.ab.decision import Decision, decide
from patcher.ab.measurement import Measurement
from patcher.bench import (
    Comparison,
    Evaluation,
    Outcome,
    Quality,
    Sample,
    Throughput,
    Timing,
    Workload,
)
from patcher.bench.ab.engine_config import ConfigTrial, Tuning
from patcher.bench.ab.quality import assess, greedy_identical
from patcher.bench.ab.throughput import compare_in_one_process
from patcher.bench.ab.windows import turn_lengths
from patcher.bench.engines import Decoding, Generation, open_engine
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.machine.environment import describe
from patcher.bench.stats.compare import compare, look_confidences, pairs_needed, read_samples
from patcher.integrate import Receipt
from patcher.reconciling.proof import Proof
from patcher.reconciling.reconcile import Reconciliation

WORKLOAD = Workload(
    model="gpt-oss-tiny", device="cpu", dtype="float32", batch=2, input_len=4, output_len=16
)


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


class FakeNvml:
    """A double for NVML, which needs a driver: it can refuse, lie, and die."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *, refuse: bool = False, ceiling: int = 1980) -> None:
        self.refuse, self.ceiling = refuse, ceiling
        self.locked: int | None = None
        self.restored = 0
        self.dead = False
        self.clock = 1980
        self.bits = 0

    def nvmlInit(self) -> None:
        return

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if self.dead:
            raise self.NVMLError("GPU is lost")
        return 3201 if kind == self.NVML_CLOCK_MEM else self.locked or self.clock

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 402_500

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return self.ceiling

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.bits

    def nvmlDeviceSetGpuLockedClocks(self, handle: int, low: int, high: int) -> None:
        if self.refuse:
            raise self.NVMLError("Insufficient Permissions")
        self.locked = high

    def nvmlDeviceResetGpuLockedClocks(self, handle: int) -> None:
        self.locked = None
        self.restored += 1


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


class ScriptedEngine:
    """A double for an engine whose step times are known: 10 ms, or less while a patch is in."""

    vocab_size = 100

    def __init__(self, gain_pct: float, short: int = 0, bad_token: bool = False) -> None:
        self.workload, self.model = WORKLOAD, torch.nn.Identity()
        self.gain_pct, self.short, self.bad_token = gain_pct, short, bad_token
        self.patched = False
        self.seen: list[tuple[int, bool]] = []
        self.rng = random.Random(0)

    @contextmanager
    def patch(self) -> Any:
        self.patched = True
        try:
            yield
        finally:
            self.patched = False

    def prompts(self, seed: int) -> torch.Tensor:
        return torch.full((2, 4), seed)

    def prefill(self, prompts: torch.Tensor) -> Decoding:
        self.seen.append((int(prompts[0, 0]), self.patched))
        return Decoding(None, [torch.zeros(2, 1, dtype=torch.long)], 0.1)

    def decode(self, decoding: Decoding, steps: int) -> None:
        token = torch.full((2, 1), 100 if self.bad_token else 1)
        decoding.picked += [token] * (steps - self.short if steps > 1 else steps)
        noise = 1 + self.rng.gauss(0, 0.001)
        decoding.decode_s += steps * 0.01 * noise / (1 + self.gain_pct / 100 * self.patched)

    def generate(self, prompts: torch.Tensor, steps: int) -> Generation:
        decoding = self.prefill(prompts)
        self.decode(decoding, steps)
        return Generation(decoding.tokens(), 0.1, decoding.decode_s)

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        raise AssertionError("not asked for here")

    def reference_logits(self, tokens: torch.Tensor, keep: int = 0) -> tuple[torch.Tensor, str]:
        raise AssertionError("not asked for here")

    def routing_entropy_pct(self, prompts: torch.Tensor, steps: int) -> float | None:
        return None

    def synchronize(self) -> None:
        return

    def release(self, decoding: Decoding) -> None:
        return

    def peak_memory_bytes(self) -> int:
        return 1 << 20

    def close(self) -> None:
        return


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


TINY = WORKLOAD.model_copy(update={"input_len": 8, "output_len": 6, "threads": 1})


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


def comparison(verdict: Any, gain: float = 3.0) -> Comparison:
    return Comparison(
        pairs=20,
        dropped_pairs=1,
        baseline_tokens_per_s=100,
        patched_tokens_per_s=100 + gain,
        gain_pct=gain,
        gain_low_pct=gain - 0.4,
        gain_high_pct=gain + 0.4,
        confidence_pct=95,
        margin_pct=0.5,
        pair_sd_pct=0.5,
        verdict=verdict,
        reason="because",
    )


def evidence(**changes: Any) -> dict[str, Any]:
    timing = Timing(
        axes={"tokens": 1},
        candidate_us=1,
        baseline_us=2,
        speedup=2,
        speedup_low=1.9,
        speedup_high=2.1,
        pairs=4,
        calls=8,
    )
    right = Evaluation(
        op="op",
        language="cpp",
        digest="d",
        outcome=Outcome.CORRECT,
        timings=(timing,),
        geomean_speedup=2.0,
    )
    throughput = Throughput(
        workload=WORKLOAD,
        patch="p",
        comparison=comparison(changes.pop("verdict", "accept")),
        control=changes.pop("control", comparison("inconclusive", 0.0)),
        windows=(),
        routing_entropy_pct=None,
        clocks="monitored: CPU, no clock control",
        environment=describe("cpu"),
    )
    quality = Quality(
        positions=10,
        reference="float64",
        baseline_rmse=1,
        patched_rmse=1,
        baseline_max_error=1,
        patched_max_error=1,
        baseline_mean_kl=1,
        patched_mean_kl=1,
        greedy_agreement_pct=100,
        baseline_reference_agreement_pct=100,
        patched_reference_agreement_pct=100,
        worst_flip_margin=None,
        flip_allowance=1,
        passed=changes.pop("same_model", True),
        reason="measured",
    )
    ran = Receipt(patch_id="p", digest="d", pid=1, calls={"a": 5}, fallbacks={})
    return {
        "throughput": throughput,
        "quality": quality,
        "evaluation": right,
        "receipt": ran,
        "quality_receipt": ran,
        "reverted_identical": True,
    } | changes


def decided(
    evaluation: Evaluation,
    reconciliation: Reconciliation | None = None,
    proof: Proof | None = None,
    **measured: Any,
) -> Decision:
    """On what `evidence` gives."""
    return decide(Measurement(**measured), evaluation, reconciliation, proof)


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
            "the patched arm runs with moe_backend=triton, by itself no faster",
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
