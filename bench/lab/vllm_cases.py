"""What each of vLLM's patch points must show: names in a profile."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PointCase:
    """One patch point."""

    op: str
    ours: str
    """The new kernel's name in a profile, as a pattern."""
    theirs: str
    """What must be gone; Inductor's rotation has no name that says so."""


CASES = (
    PointCase(
        "fused_add_rms_norm",
        r"^fused_add_rms_norm_kernel",
        r"^triton_.*fused_add_rms_norm|vllm::fused_add_rms_norm",
    ),
    PointCase("rope_kv_update", r"^rope_kv_update_kernel", r"reshape_and_cache_flash"),
    PointCase(
        "moe_route",
        r"^moe_route_kernel",
        r"^_topk_forward|^_sum_bitmatrix_rows|^_combined_routing",
    ),
    PointCase("moe_reduce", r"^moe_reduce_kernel", r"^_reduce_grouped"),
    PointCase("moe_matmul_swiglu", r"^moe_matmul_swiglu_kernel", r"^_matmul_ogs_.*_swiglu"),
    PointCase("moe_matmul_down", r"^moe_matmul_down_kernel", r"^_matmul_ogs_(?!.*_swiglu)"),
    # with a bias: the model's head is a matmul of the same library, and has none
    PointCase("linear", r"^linear_kernel", r"^nvjet_.*_bias_"),
    # in the place of moe_reduce, which it leaves nothing to do
    PointCase("reduce_add_rms_norm", r"^reduce_add_rms_norm_kernel", r"^_reduce_grouped"),
)


def of_patch(run: dict[str, Any], patch_id: str) -> dict[str, Any]:
    """A run's calls and fallbacks, those of one patch alone."""
    calls = {key: count for key, count in run["calls"].items() if key == patch_id}
    start = f"{patch_id}: "
    fallbacks = {key: count for key, count in run["fallbacks"].items() if key.startswith(start)}
    return {**run, "calls": calls, "fallbacks": fallbacks}


def counted(
    name: str,
    case: PointCase,
    stock: dict[str, Any],
    patched: dict[str, Any],
    steps: int,
    expected: int,
) -> list[dict[str, Any]]:
    """Receipts against nsys against what the model's code says.

    Args:
        expected: calls of the new kernel a step.
    """
    calls = sum(patched["calls"].values()) / steps
    ours = matching(case.ours, patched["kernels"]) / steps
    theirs = matching(case.theirs, patched["kernels"]) / steps
    before = matching(case.theirs, stock["kernels"]) / steps
    fallbacks = patched["fallbacks"]
    return [
        check(f"{name}: receipts, calls a step", calls == expected, calls),
        check(f"{name}: no fallbacks in steady decode", not fallbacks, fallbacks),
        check(f"{name}: nsys, launches of the new kernel a step", ours == calls, ours),
        check(f"{name}: nsys, launches of the old ones a step", theirs == 0, theirs),
        check(f"{name}: nsys, of the old ones before", before > 0, before),
    ]


def matching(pattern: str, kernels: dict[str, int]) -> int:
    """Launches of the kernels whose name matches."""
    return sum(count for name, count in kernels.items() if re.search(pattern, name))


def check(what: str, passed: bool, seen: object) -> dict[str, Any]:
    return {"what": what, "passed": passed, "seen": seen}
