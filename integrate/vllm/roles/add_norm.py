"""vLLM's residual add + RMSNorm: `RMSNorm.forward`, of every model that uses it.

Inductor decomposes norms and fuses them with their neighbours, so there is no kernel to replace.
The patch installs an opaque operator that works in place on both tensors, like vLLM's former C
kernel. `RMSNorm` inherits `forward` from `CustomOp`, and dynamo traces it, so one attribute of one
class covers eager, piecewise and full graph modes. `CustomOp.register_oot` would only cover layers
built later and cannot be undone. The IR op's providers are not used, since vLLM 0.34 drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import (
    engines_add_norm,
    must_allow_another,
    must_not_split_sequences,
)
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LAYERNORM = "vllm.model_executor.layers.layernorm"

NORM_FUSIONS = "fuse_allreduce_rms", "fuse_norm_quant", "fuse_act_padding"


class AddRmsNorm(VllmPoint):
    """Every `RMSNorm` with a residual, a weight, and a mean over the whole row."""

    name: ClassVar[str] = "add_norm"
    op: ClassVar[str] = "fused_add_rms_norm"
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LAYERNORM}:RMSNorm.__init__",
        f"{_LAYERNORM}:RMSNorm.forward_native",
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "vllm.model_executor.custom_op:CustomOp.forward",
        "vllm._custom_ops:fused_add_rms_norm",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        AttributePatch(sources.module(_LAYERNORM).RMSNorm, "forward").must_be_the_engines()
        replaced = sources.module("vllm.model_executor.custom_op").op_registry_oot
        if "RMSNorm" in replaced:
            raise VerificationError(
                f"RMSNorm is replaced by {replaced['RMSNorm'].__name__}", "disable its plugin"
            )
        must_allow_another("norm")
        must_not_split_sequences()
        return f"{_LAYERNORM}.RMSNorm.forward"

    def of_role(self, layer: Any) -> bool:
        norms = sources.module(_LAYERNORM)
        return isinstance(layer, norms.RMSNorm | norms.GemmaRMSNorm)

    def applies(self, layer: Any) -> str | None:
        norms = sources.module(_LAYERNORM)
        if isinstance(layer, norms.GemmaRMSNorm):
            return "a weight that is offset by one"
        return _unlike(layer, norms.RMSNorm)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        norm = sources.module(_LAYERNORM).RMSNorm
        swap = AttributePatch(norm, "forward")
        original = swap.original
        operator = kernel.op(engines_add_norm())

        def forward(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            if residual is None or _unlike(layer, norm) is not None:
                return original(layer, x, residual)
            operator(x, residual, layer.weight.data, layer.variance_epsilon)
            return x, residual

        swap.install(forward)
        self._swaps = [swap]
        self.name_lost_fusions()


def _unlike(layer: Any, kind: Any) -> str | None:
    """Why a layer is not exactly of that class, with a weight and a mean over the whole row; None
    if it is."""
    if type(layer) is not kind:
        return f"a norm of class {type(layer).__name__}"
    if not layer.pass_weight_add:
        return "no weight"
    return None if layer.variance_size_override is None else "a mean over a part of the row"
