"""vLLM's residual add + RMSNorm: `RMSNorm.forward`, of every model that uses it.

Inductor decomposes norms and fuses them with their neighbours, so there is no kernel to replace.
The patch installs an opaque operator that works in place on both tensors, like vLLM's former C
kernel. `RMSNorm` inherits `forward` from `CustomOp`, and dynamo traces it, so one attribute of one
class covers eager, piecewise and full graph modes. `CustomOp.register_oot` would only cover layers
built later and cannot be undone. The IR op's providers are not used, since vLLM 0.34 drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.engine import (
    engines_add_norm,
    must_allow_another,
    must_not_be_replaced,
    must_not_split_sequences,
)
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import SharedPatch

LAYERNORM = "vllm.model_executor.layers.layernorm"
FORWARD = Callable[[Any, Any, torch.Tensor, Any], Any]
"""What a point has in the `forward` of a norm: it is given the engine's own, the layer, x and the
residual or None."""

NORM_FUSIONS = "fuse_allreduce_rms", "fuse_norm_quant", "fuse_act_padding"


class AddRmsNorm(VllmPoint):
    """Every `RMSNorm` with a residual, a weight, and a mean over the whole row."""

    name: ClassVar[str] = "add_norm"
    op: ClassVar[str] = "fused_add_rms_norm"
    fusions: ClassVar[tuple[str, ...]] = NORM_FUSIONS
    parts: ClassVar[tuple[str, ...]] = (
        f"{LAYERNORM}:RMSNorm.__init__",
        f"{LAYERNORM}:RMSNorm.forward_native",
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "vllm.model_executor.custom_op:CustomOp.forward",
        "vllm._custom_ops:fused_add_rms_norm",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        norm_place(sources.module(LAYERNORM).RMSNorm, self.name).must_have_room()
        must_not_be_replaced("RMSNorm")
        must_allow_another("norm")
        must_not_split_sequences()
        return f"{LAYERNORM}.RMSNorm.forward"

    def of_role(self, layer: Any) -> bool:
        norms = sources.module(LAYERNORM)
        return isinstance(layer, norms.RMSNorm | norms.GemmaRMSNorm)

    def applies(self, layer: Any) -> str | None:
        norms = sources.module(LAYERNORM)
        if isinstance(layer, norms.GemmaRMSNorm):
            return "a weight that is offset by one"
        return unlike_norm(layer, norms.RMSNorm)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        norm = sources.module(LAYERNORM).RMSNorm
        operator = kernel.op(engines_add_norm())

        def part(original: Any, layer: Any, x: torch.Tensor, residual: torch.Tensor) -> Any:
            if unlike_norm(layer, norm) is not None:
                return original(layer, x, residual)
            operator(x, residual, layer.weight.data, layer.variance_epsilon)
            return x, residual

        place = norm_place(norm, self.name)
        place.install(part)
        self._swaps = [place]
        self.name_lost_fusions()


def norm_place(kind: Any, point: str) -> SharedPatch:
    """The place of a point in the `forward` of a class of norms: that of `add_norm` is called with
    a residual, any other without one.

    Args:
        kind: the class.
        point: the name of the patch point.
    """
    return SharedPatch(kind, "forward", point, _sharing)


def _sharing(original: Any, parts: dict[str, FORWARD]) -> Any:
    def forward(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        for point, part in parts.items():
            if (point == AddRmsNorm.name) is (residual is not None):
                return part(original, layer, x, residual)
        return original(layer, x, residual)

    return forward


def unlike_norm(layer: Any, kind: Any) -> str | None:
    """Why a layer is not exactly of that class, with a weight and a mean over the whole row; None
    if it is."""
    if type(layer) is not kind:
        return f"a norm of class {type(layer).__name__}"
    if not layer.pass_weight_add:
        return "no weight"
    return None if layer.variance_size_override is None else "a mean over a part of the row"
