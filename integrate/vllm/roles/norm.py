"""RMSNorm without a residual: `RMSNorm.forward`, and `GemmaRMSNorm.forward`, whose weight is kept
as an offset from one.

The first norm of a model, norms after a sublayer (Gemma, OLMo 2), and those of low-rank states
(MLA) have no residual. Heads of a query or key that lie beside others are no rows of one pitch:
they stay with the engine, whose compiler fuses them with the rotation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.roles.add_norm import FORWARD, LAYERNORM, norm_place, unlike_norm
from patcher.integrate.vllm.roles.tried import TriedLayers, left_to_the_engine, rows_of
from patcher.integrate.vllm.swap import SharedPatch

_COPY = "rows without one pitch"


class _Norm(TriedLayers):
    """Norms of one class that are called without a residual."""

    module: ClassVar[str] = LAYERNORM
    fused_by: ClassVar[tuple[str, ...]] = (
        "fuse_norm_quant",
        "fuse_allreduce_rms",
        "enable_qk_norm_rope_fusion",
        "fuse_qk_norm_rope_kvcache",
        "fuse_mla_dual_rms_norm",
    )

    def find(self) -> str:
        engine.must_allow_another("norm")
        engine.must_not_split_sequences()
        return super().find()

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def trial(self, layer: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        weight = layer.weight.data
        row = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device, dtype=weight.dtype)
        rows = torch.stack([row, 30 * row.flip(0)])
        given = {"input": rows, "weight": weight, "output": rows}
        return layer.forward_native(rows), given | {"epsilon": layer.variance_epsilon}

    def _place(self) -> SharedPatch:
        return norm_place(self._class(), self.name)

    def _part(self, kernel: Dispatcher) -> FORWARD:
        operator, unlike, kind = kernel.op(self._engines()), self.unlike, self._class()
        count = left_to_the_engine(kernel, _COPY)

        def part(original: Any, layer: Any, x: torch.Tensor, residual: None) -> Any:
            if unlike(layer, kind) is not None:
                return original(layer, x, residual)
            rows = rows_of(x)
            if rows is None:
                count()
                return original(layer, x, residual)
            output = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
            operator(rows, layer.weight.data, output, layer.variance_epsilon)
            return output.view(x.shape)

        return part

    @abstractmethod
    def _engines(self) -> Callable[..., None]:
        """The engine's own norm of rows into a tensor."""


class RmsNorm(_Norm):
    """`RMSNorm` with a weight and a mean over the whole row."""

    name: ClassVar[str] = "norm.plain"
    op: ClassVar[str] = "rms_norm"
    layer: ClassVar[str] = "RMSNorm"
    parts: ClassVar[tuple[str, ...]] = (
        f"{LAYERNORM}:RMSNorm.__init__",
        f"{LAYERNORM}:RMSNorm.forward_native",
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "vllm.model_executor.custom_op:CustomOp.forward",
        "vllm.ir.ops.layernorm:rms_norm",
        "vllm._custom_ops:rms_norm",
    )

    def of_role(self, layer: Any) -> bool:
        norms = sources.module(LAYERNORM)
        return isinstance(layer, norms.RMSNorm | norms.GemmaRMSNorm)

    def applies(self, layer: Any) -> str | None:
        if isinstance(layer, sources.module(LAYERNORM).GemmaRMSNorm):
            return "a weight that is offset by one"
        return super().applies(layer)

    def unlike(self, layer: Any, kind: Any) -> str | None:
        return unlike_norm(layer, kind) or (None if layer.pass_weight else "no weight")

    def _engines(self) -> Callable[..., None]:
        return engine.engines_norm()


class GemmaRmsNorm(_Norm):
    """`GemmaRMSNorm`, which multiplies by one more than its weight."""

    name: ClassVar[str] = "norm.gemma"
    op: ClassVar[str] = "gemma_rms_norm"
    layer: ClassVar[str] = "GemmaRMSNorm"
    parts: ClassVar[tuple[str, ...]] = (
        f"{LAYERNORM}:GemmaRMSNorm.__init__",
        f"{LAYERNORM}:GemmaRMSNorm.forward_native",
        f"{LAYERNORM}:GemmaRMSNorm.forward_cuda",
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "vllm.model_executor.custom_op:CustomOp.forward",
        "vllm.ir.ops.layernorm:rms_norm",
    )

    def unlike(self, layer: Any, kind: Any) -> str | None:
        return None if type(layer) is kind else f"a norm of class {type(layer).__name__}"

    def _engines(self) -> Callable[..., None]:
        norm = engine.norm_in_pytorch

        def run(
            x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
        ) -> None:
            norm(x, weight.float() + 1.0, output, epsilon)

        return run
