"""What test_measure and others share."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Any

import torch

from patcher.ab.decision import Decision, decide
from patcher.ab.measurement import Measurement
from patcher.bench import (
    Comparison,
    Evaluation,
    Outcome,
    Quality,
    Throughput,
    Timing,
    Workload,
)
from patcher.bench.engines import Decoding, Generation
from patcher.bench.machine.environment import describe
from patcher.integrate import Receipt
from patcher.reconciling.proof import Proof
from patcher.reconciling.reconcile import Reconciliation

WORKLOAD = Workload(
    model="gpt-oss-tiny", device="cpu", dtype="float32", batch=2, input_len=4, output_len=16
)


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


TINY = WORKLOAD.model_copy(update={"input_len": 8, "output_len": 6, "threads": 1})


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
