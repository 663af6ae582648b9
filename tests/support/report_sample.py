"""A plausible whole report for the tests of patcher.report; its figures are invented."""

from __future__ import annotations

import math
import random
from typing import Any, Literal

from patcher.ab.best_set import BestSet, Combination, best_set
from patcher.ab.decision import Decision
from patcher.ab.other_workloads import OtherPoint, OtherWorkloads, PeakMemory
from patcher.attempts import Attempt, Recommendation
from patcher.bench import (
    BaselineTime,
    Check,
    Comparison,
    Environment,
    Evaluation,
    Outcome,
    Quality,
    Throughput,
    Timing,
    Window,
    Workload,
)
from patcher.bench.stats.comparison import Arm, Verdict
from patcher.hotspot import Hotspot, Profile
from patcher.models import Usage
from patcher.reconciling.launches import ShapeLaunches, StepLaunches
from patcher.reconciling.reconcile import PatchedKernel, reconcile
from patcher.report import PatchReceipts, ReceiptRow, Report
from patcher.verdicts.human_verdict import HumanVerdict, HumanWord

SOURCE = """\
// fused_add_rms_norm: residual += input; input = residual / rms(residual) * weight
#include <cmath>
#include <tvm/ffi/container/tensor.h>

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView residual,
                        tvm::ffi::TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  float* x = static_cast<float*>(input.data_ptr());
  float* r = static_cast<float*>(residual.data_ptr());
  const float* w = static_cast<const float*>(weight.data_ptr());
  for (int64_t t = 0; t < tokens; ++t, x += hidden, r += hidden) {
    float total = 0.f;
    for (int64_t i = 0; i < hidden; ++i) r[i] += x[i], total += r[i] * r[i];
    const float scale = 1.f / std::sqrt(total / hidden + static_cast<float>(epsilon));
    for (int64_t i = 0; i < hidden; ++i) x[i] = r[i] * scale * w[i];
  }
}
"""

_NORM = (
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, "
    "c10::BFloat16*, const c10::BFloat16*, float, int, int)"
)
KERNELS: list[tuple[str, str, str, str | None, float, int]] = [
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu", "triton", "moe", None, 27.41, 576),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "cublas", "gemm", None, 18.92, 1152),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", "triton", "moe", None, 14.05, 576),
    (_NORM, "vllm", "norm", "fused_add_rms_norm", 7.83, 1152),
    ("kernel_unified_attention_2d", "triton", "attention", None, 6.47, 576),
    ("nvjet_tst_192x8_64x8_2x1_v_bz_splitK_TNT", "cublas", "gemm", None, 5.1, 24),
    ("_topk_forward", "triton", "routing", None, 2.9, 576),
    ("triton_poi_fused_add_mul_split_0", "inductor", "elementwise", None, 1.4, 576),
]


def profile() -> dict[str, Any]:
    total = 77_548_893
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "origin": origin,
            "operation": operation,
            "instances": instances,
            "total_ns": int(total * share / 100),
            "mean_ns": total * share / 100 / instances,
            "median_ns": total * share / 100 / instances,
            "min_ns": 1000,
            "max_ns": 90000,
            "share_pct": share,
            "op": op,
        }
        for name, origin, operation, op, share, instances in KERNELS
    ]
    return {
        "schema_version": 1,
        "model": "gpt-oss-20b",
        "source": "nsys SQLite export decode.sqlite",
        "total_kernel_ns": total,
        "busy_ns": 70_123_456,
        "warnings": [],
        "kernels": [{key: value for key, value in row.items() if key != "op"} for row in rows],
        "hotspots": [
            {
                "rank": rank,
                "name": row["name"],
                "share_pct": row["share_pct"],
                "origin": row["origin"],
                "operation": row["operation"],
                "op": row["op"],
                "ceiling_pct": row["share_pct"] / (100 - row["share_pct"]) * 100,
                "per_step": row["instances"] / 24,
            }
            for rank, row in enumerate(rows, 1)
        ],
    }


def windows(gain_pct: float, control_pct: float = 0.02, pairs: int = 32) -> tuple[Window, ...]:
    noise = random.Random(7)
    found: list[Window] = []
    for pair in range(pairs):
        kind: Literal["ab", "aa"] = "aa" if pair % 4 == 3 else "ab"
        gain = (control_pct if kind == "aa" else gain_pct) + noise.gauss(0, 0.45)
        base = 551.0 * math.exp(noise.gauss(0, 0.004))
        rates: dict[Arm, float] = {"baseline": base, "patched": base * (1 + gain / 100)}
        found += [
            Window(pair=pair, arm=arm, kind=kind, tokens=1024, decode_s=1024 / rate, prefill_s=0.2)
            for arm, rate in rates.items()
        ]
    return tuple(found)


def comparison(gain_pct: float, half_pct: float, pairs: int, **changes: Any) -> Comparison:
    values: dict[str, Any] = {
        "pairs": pairs,
        "dropped_pairs": 1,
        "baseline_tokens_per_s": 551.3,
        "patched_tokens_per_s": 551.3 * (1 + gain_pct / 100),
        "gain_pct": gain_pct,
        "gain_low_pct": gain_pct - half_pct,
        "gain_high_pct": gain_pct + half_pct,
        "confidence_pct": 97.5,
        "margin_pct": 0.5,
        "pair_sd_pct": 0.46,
        "verdict": "accept",
        "reason": "The lower end of the interval is above the margin.",
    }
    return Comparison(**{**values, **changes})


WORKLOAD = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="float32",
    batch=8,
    input_len=32,
    output_len=128,
    threads=2,
)
ENVIRONMENT = Environment(
    device="AMD EPYC 9654 96-Core Processor",
    device_kind="cpu",
    python="3.11.9",
    packages={"torch": "2.13.0", "transformers": "5.23.0", "apache-tvm-ffi": "0.1.9"},
    compiler="g++ 12.2.0",
    clocks="monitored: CPU, no clock control",
    threads=2,
)


def evaluation() -> Evaluation:
    timings = []
    for tokens, base, speedup in (
        (1, 6.1, 4.4),
        (4, 7.2, 4.1),
        (8, 8.8, 3.6),
        (16, 11.9, 3.2),
        (32, 18.4, 2.7),
    ):
        timings.append(
            Timing(
                axes={"tokens": tokens, "hidden": 256},
                candidate_us=base / speedup,
                baseline_us=base,
                speedup=speedup,
                speedup_low=speedup * 0.965,
                speedup_high=speedup * 1.04,
                pairs=40,
                calls=4000,
            )
        )
    return Evaluation(
        op="fused_add_rms_norm",
        language="cpp",
        digest="9f2c7b1e55aa0d3c" * 4,
        outcome=Outcome.CORRECT,
        checks=(
            Check(
                name="values",
                passed=True,
                detail="12 seeded inputs; worst error 0.8 of the allowance",
            ),
            Check(name="poisoned outputs", passed=True, detail="every element written"),
            Check(name="read-only inputs", passed=True, detail="weight unchanged, 12 digests"),
            Check(name="timed outputs", passed=True, detail="outputs of the timed calls are right"),
        ),
        baseline="torch.compile",
        baselines={
            "torch.compile": BaselineTime(time_us=9.72),
            "eager": BaselineTime(time_us=21.4),
            "flashinfer": BaselineTime(missing="not installed"),
        },
        timings=tuple(timings),
        timing_method="Interleaved blocks in one process, order randomised.",
        geomean_speedup=3.54,
        sandbox="a process of its own, scrubbed environment",
        environment=ENVIRONMENT,
    )


def attempt(
    iteration: int,
    phase: str,
    outcome: Outcome,
    speedup: float | None,
    detail: str,
    asked: str = "",
) -> Attempt:
    return Attempt.model_validate(
        {
            "iteration": iteration,
            "phase": phase,
            "digest": f"{iteration:064x}",
            "outcome": outcome,
            "geomean_speedup": speedup,
            "detail": detail,
            "usage": Usage(input_tokens=2100, output_tokens=900),
            "model": "recorded",
            "reply_source": "recorded",
            "recommendation": Recommendation(
                bottleneck="memory", change=asked, expected_speedup=None
            )
            if asked
            else None,
        }
    )


ATTEMPTS = (
    attempt(
        0,
        "functional",
        Outcome.COMPILATION_FAILURE,
        None,
        "error: 'rsqrtf' was not declared in this scope",
    ),
    attempt(
        1, "functional", Outcome.MISMATCH, None, "input[3, 17]: 0.412 where 0.398 was expected"
    ),
    attempt(2, "functional", Outcome.CORRECT, 2.1, "right; 2.10 times as fast"),
    attempt(
        3,
        "optimisation",
        Outcome.CORRECT,
        3.54,
        "right; 3.54 times as fast",
        "One pass over the row, kept in cache",
    ),
    attempt(4, "optimisation", Outcome.TOO_SLOW, 0.92, "right, slower", "One thread per row"),
    attempt(5, "optimisation", Outcome.RUNTIME_ERROR, None, "signal 11", "Aligned 64-byte loads"),
)


REASONS = (
    "The lower end of the interval, +1.83 %, is above the margin of +0.50 %.",
    "The patched kernel ran in every patched window and in no other.",
    "The model's outputs stay within the baseline's own error.",
)


def decision(
    verdict: Verdict, gain_pct: float = 2.04, reasons: tuple[str, ...] = REASONS
) -> Decision:
    return Decision(
        verdict=verdict,
        reasons=reasons,
        gain_pct=gain_pct,
        gain_low_pct=gain_pct - 0.21,
        gain_high_pct=gain_pct + 0.21,
        margin_pct=0.5,
    )


def patched_kernel(per_step: float = 16, **changes: Any) -> PatchedKernel:
    """The evaluated kernel, run that often in a step at the workload's batch."""
    label = "tokens=8 hidden=256 float32"
    axes = {"tokens": 8, "hidden": 256}
    shape = ShapeLaunches(label=label, axes=axes, dtypes=("float32",), per_step=per_step)
    launches = StepLaunches(op="fused_add_rms_norm", shapes=(shape,), source="the contract")
    return PatchedKernel(**{"evaluation": evaluation(), "launches": launches} | changes)


def throughput_of(gain: float = 2.04, **changes: Any) -> Throughput:
    """An A/B with its control."""
    values: dict[str, Any] = {
        "workload": WORKLOAD,
        "patch": "fused_add_rms_norm-9f2c7b1e",
        "comparison": comparison(gain, 0.21, 23),
        "control": comparison(
            0.03,
            0.36,
            8,
            verdict="reject",
            dropped_pairs=0,
            reason="The upper end of the interval is below the margin.",
        ),
        "windows": windows(gain),
        "routing_entropy_pct": 97.3,
        "clocks": "monitored: CPU, no clock control",
        "environment": ENVIRONMENT,
    }
    return Throughput(**{**values, **changes})


def sample(**changes: Any) -> Report:
    """The whole report, with some fields replaced."""
    gain = 2.04
    throughput = throughput_of(gain)
    values: dict[str, Any] = {
        "run_id": "20261121-071900-gpt-oss-tiny-a3f1",
        "created": "2026-11-21T07:19:00+00:00",
        "title": "fused_add_rms_norm for gpt-oss-tiny on transformers",
        "commands": (
            "patcher demo",
            "patcher throughput gpt-oss-tiny --patch fused_add_rms_norm-9f2c7b1e",
        ),
        "model": "gpt-oss-tiny",
        "workload": WORKLOAD,
        "recorded_conversation": True,
        "recorded_note": "It was recorded once with a real model and is replayed word for word.",
        "profile": profile(),
        "attempts": ATTEMPTS,
        "best": evaluation(),
        "candidate_source": SOURCE,
        "candidate_language": "cpp",
        "patch_id": "fused_add_rms_norm-9f2c7b1e",
        "throughput": throughput,
        "quality": Quality(
            positions=256,
            reference="float64 upcast",
            baseline_rmse=3.1e-6,
            patched_rmse=2.9e-6,
            baseline_max_error=2.4e-5,
            patched_max_error=2.2e-5,
            baseline_mean_kl=4.1e-12,
            patched_mean_kl=3.9e-12,
            greedy_agreement_pct=100.0,
            baseline_reference_agreement_pct=98.9,
            patched_reference_agreement_pct=99.1,
            worst_flip_margin=None,
            flip_allowance=4.6e-5,
            passed=True,
            reason="The patched error is within the baseline's own.",
        ),
        "receipt": ReceiptRow(
            calls={"fused_add_rms_norm tokens=8 hidden=256 float32/float32": 139_264},
            fallbacks={"tokens=256: not supported": 34},
        ),
        "quality_receipt": ReceiptRow(calls={"fused_add_rms_norm tokens=8": 512}),
        "reconciliation": reconcile([patched_kernel()], throughput),
        "decision": decision("accept", gain),
        "reverted_identical": True,
        "environment": ENVIRONMENT,
    }
    return Report(**{**values, **changes})


def patched(profile: Profile, old: str = "fused_add_rms_norm", share: float = 0.6) -> Profile:
    """A real profile as if one op's kernels took that share of their time."""

    def shrink(spot: Hotspot) -> Hotspot:
        if spot.op != old or spot.kind != "kernel":
            return spot
        name = f"patcher_{old}({spot.rank})"
        times = {key: int(getattr(spot, key) * share) for key in ("total_ns", "exposed_ns")}
        return spot.model_copy(update={"name": name, **times})

    return profile.model_copy(
        update={"source": "after.sqlite", "hotspots": tuple(map(shrink, profile.hotspots))}
    )


def in_processes(taken: tuple[Window, ...], pairs: int) -> tuple[Window, ...]:
    """The windows as if fresh processes began every so many pairs, arms swapped in turn."""
    return tuple(
        one.model_copy(update={"process": one.pair // pairs, "swapped": one.pair // pairs % 2 == 1})
        for one in taken
    )


def elsewhere() -> OtherWorkloads:
    points = [
        OtherPoint(batch=batch, context=context, comparison=comparison(gain, 0.4, 12))
        for batch, context, gain in ((1, 1024, 0.3), (32, 1024, 1.1), (8, 8192, -0.2))
    ]
    memory = PeakMemory(baseline_bytes=61_203_283_968, patched_bytes=61_270_392_832)
    return OtherWorkloads(points=tuple(points), memory=memory)


def sets() -> BestSet:
    found = {("norm",): 2.0, ("rope",): 0.9, ("norm", "rope"): 2.8}
    return best_set(
        [
            Combination(patches=names, comparison=comparison(gain, 0.2, 30, p_value=1e-5))
            for names, gain in found.items()
        ]
    )


def word(
    said: HumanWord = "reject", reason: str | None = "nobody can maintain this source"
) -> HumanVerdict:
    return HumanVerdict(
        time="2026-11-21T08:00:00+00:00",
        word=said,
        reason=reason,
        by=None,
        rule="accept",
        patch_id="fused_add_rms_norm-9f2c7b1e",
        digest="d" * 64,
    )


def full(before: Profile) -> Report:
    """Everything that a report can hold, around a real profile."""
    taken = [
        one.model_copy(update={"sm_clock_mhz": 1965, "temperature_c": 40 + one.pair % 9})
        for one in in_processes(windows(2.04), 8)
    ]
    throughput = throughput_of(windows=tuple(taken))
    lit = evaluation()
    timings = [
        one.model_copy(update={"sol_pct": 8.0 + 6 * index}) for index, one in enumerate(lit.timings)
    ]
    after = patched(before)
    return sample(
        best=lit.model_copy(update={"timings": tuple(timings)}),
        throughput=throughput,
        profile=before,
        profile_after=after,
        reconciliation=reconcile([patched_kernel()], throughput, before, after),
        elsewhere=elsewhere(),
        best_set=sets(),
        words=(word(),),
    )


def together() -> Report:
    """Seven patches, measured outside of a run."""
    ops = ("rope", "route", "linear", "swiglu", "down", "norm", "reduce")
    names = tuple(f"moe_matmul_{op}-cuda-{index:08x}" for index, op in enumerate(ops))
    receipts = tuple(
        PatchReceipts(
            patch_id=name,
            op=op,
            ab=ReceiptRow(calls={f"{op} tokens=8": 1000 + index}, fallbacks={"tokens=9": index}),
            quality=ReceiptRow(calls={f"{op} tokens=8": 32}),
        )
        for index, (name, op) in enumerate(zip(names, ops, strict=True))
    )
    both = " + ".join(names)
    return sample(run_id=both, patch_id=both, title="gpt-oss-tiny", receipts=receipts)
