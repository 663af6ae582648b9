"""What the patch points of vLLM's Triton experts for MXFP4 weights share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from patcher.integrate.vllm import sources
from patcher.integrate.vllm.point import VllmPoint

TRITON: Mapping[str, str] = {"moe_backend": "triton"}
"""The backend of these experts; on compute capability 9.0 it is the default, too."""
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"


class TritonExperts(VllmPoint):
    """A patch point in the forward pass of `OAITritonMxfp4ExpertsMonolithic`.

    Its functions run inside the operator `vllm::moe_forward`, which compilers do not decompose.
    """

    wants: ClassVar[Mapping[str, str]] = TRITON

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_RUNNER).MoERunner)

    def applies(self, layer: Any) -> str | None:
        kernel = layer._quant_method.moe_kernel
        experts = layer._quant_method if kernel is None else kernel.fused_experts
        if type(experts).__name__ != "OAITritonMxfp4ExpertsMonolithic":
            return f"experts by {type(experts).__name__}"
        if layer.routed_experts.expert_map is not None:
            return "experts shared by several ranks"
        return None
