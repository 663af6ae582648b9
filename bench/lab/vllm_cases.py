"""Kernel names that each of vLLM's patch points adds to a profile or removes from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from patcher.bench import Candidate


@dataclass(frozen=True)
class PointCase:
    """Expected kernel names of one patch point."""

    theirs: str
    """Regular expression of kernels that must disappear. Inductor's rotary embedding has no
    recognisable name."""
    graphs_alone: bool = False
    """Whether it is found in a graph that vLLM compiles, so that an eager engine never calls it."""

    def calls_in(self, mode: str, calls: int) -> int:
        """Calls per step in that mode of CUDA graphs.

        Args:
            calls: those of a compiled engine.
        """
        return 0 if mode == "eager" and self.graphs_alone else calls


CASES = {
    "fused_add_rms_norm": PointCase(r"^triton_.*fused_add_rms_norm|vllm::fused_add_rms_norm"),
    "rope_kv_update": PointCase(r"reshape_and_cache_flash", True),
    "decode_attention": PointCase(r"flash::FlashAttnFwdSm\d+<"),
    "moe_route": PointCase(r"^_topk_forward|^_sum_bitmatrix_rows|^_combined_routing"),
    "moe_reduce": PointCase(r"^_reduce_grouped"),
    "moe_matmul_swiglu": PointCase(r"^_matmul_ogs_.*_swiglu"),
    "moe_matmul_down": PointCase(r"^_matmul_ogs_(?!.*_swiglu)"),
    # with a bias, unlike the model's head, which is a matmul of the same library
    "linear": PointCase(r"^nvjet_.*_bias_"),
    # replaces moe_reduce, which then has nothing to do
    "reduce_add_rms_norm": PointCase(r"^_reduce_grouped", True),
    # of several ops; those of the projection and the router are matmuls like others
    "qkv_rope_kv_update": PointCase(r"reshape_and_cache_flash", True),
    "add_rms_norm_route": PointCase(
        r"^_topk_forward|^_sum_bitmatrix_rows|^_combined_routing", True
    ),
    "moe_block": PointCase(
        r"^_topk_forward|^_sum_bitmatrix_rows|^_combined_routing|^_matmul_ogs_|^_reduce_grouped",
        True,
    ),
}
"""By op."""


def kernel_names(candidate: Candidate) -> str:
    """A regular expression of the names that a profile gives the kernels of CUDA or Triton."""
    source = re.sub(r"__(launch_bounds|cluster_dims)__\s*\([^{;]*?\)\s", " ", candidate.source)
    jitted = re.findall(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)", source)
    found = jitted or re.findall(r"__global__[^(]*?(\w+)\s*\(", source)
    return rf"\b(?:{'|'.join(sorted(set(found)))})\b"


def of_patch(run: dict[str, Any], patch_id: str) -> dict[str, Any]:
    """Restrict a run's calls and fallbacks to one patch."""
    calls = {key: count for key, count in run["calls"].items() if key == patch_id}
    start = f"{patch_id}: "
    fallbacks = {key: count for key, count in run["fallbacks"].items() if key.startswith(start)}
    return {**run, "calls": calls, "fallbacks": fallbacks}


def counted(
    name: str,
    kernels: tuple[str, str],
    stock: dict[str, Any],
    patched: dict[str, Any],
    steps: int,
    expected: int,
) -> list[dict[str, Any]]:
    """Compare receipts, nsys and the number of calls that the model's code implies.

    Args:
        name: label of the checks.
        kernels: regular expressions of the patch's kernels and of those that must disappear.
        stock: the run without patches.
        patched: the run with the patch.
        steps: number of decode steps.
        expected: calls of the new kernel per step; 0: the engine's own run instead.
    """
    calls = sum(patched["calls"].values()) / steps
    new, old = kernels
    ours = matching(new, patched["kernels"]) / steps
    theirs = matching(old, patched["kernels"]) / steps
    before = matching(old, stock["kernels"]) / steps
    fallbacks = patched["fallbacks"]
    if not expected:
        return [
            check(f"{name}: receipts, calls a step", calls == 0, calls),
            check(f"{name}: nsys, launches of the new kernel a step", ours == 0, ours),
            check(f"{name}: nsys, launches of the old ones as before", theirs == before, theirs),
        ]
    return [
        check(f"{name}: receipts, calls a step", calls == expected, calls),
        check(f"{name}: no fallbacks in steady decode", not fallbacks, fallbacks),
        check(f"{name}: nsys, launches of the new kernel a step", ours == calls, ours),
        check(f"{name}: nsys, launches of the old ones a step", theirs == 0, theirs),
        check(f"{name}: nsys, of the old ones before", before > 0, before),
    ]


def matching(pattern: str, kernels: dict[str, int]) -> int:
    """Number of launches of kernels whose name matches."""
    return sum(count for name, count in kernels.items() if re.search(pattern, name))


def check(what: str, passed: bool, seen: object) -> dict[str, Any]:
    return {"what": what, "passed": passed, "seen": seen}
