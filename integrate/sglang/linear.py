"""SGLang's linear layers without quantisation: `UnquantizedLinearMethod.apply`.

The vocabulary's output matrix is not such a layer. SGLang's `apply_into` and `apply_with_addend`
and the small router kernel of gpt-oss (`TinyGemmLinear`, up to 128 rows) do not call it either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.sglang import engine, sources
from patcher.integrate.sglang.point import SglangPoint

_LINEAR = "sglang.srt.layers.linear"
_UNQUANT = "sglang.srt.layers.quantization.unquant"


class SglangLinear(SglangPoint):
    """Every linear layer whose weight is a plain matrix."""

    name: ClassVar[str] = "linear"
    op: ClassVar[str] = "linear"
    module: ClassVar[str] = _UNQUANT
    owner: ClassVar[str] = "UnquantizedLinearMethod"
    method: ClassVar[str] = "apply"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_UNQUANT}:UnquantizedLinearMethod.create_weights",
        f"{_UNQUANT}:UnquantizedLinearMethod.process_weights_after_loading",
        f"{_UNQUANT}:UnquantizedLinearMethod.apply",
        f"{_UNQUANT}:Bf16GemmBackend",
        f"{_UNQUANT}:get_bf16_gemm_backend",
        f"{_LINEAR}:ReplicatedLinear.forward",
        f"{_LINEAR}:ColumnParallelLinear.forward",
        f"{_LINEAR}:RowParallelLinear.forward",
    )

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, sources.module(_LINEAR).LinearBase)

    def applies(self, layer: Any) -> str | None:
        method = layer.quant_method
        if type(method) is not self._class():
            return f"weights by {type(method).__name__}"
        if not engine.uses_plain_gemm():
            return "another matmul of --bf16-gemm-backend"
        if getattr(layer, "use_intel_amx_backend", False):
            return "a weight that is packed for a CPU"
        if getattr(layer, "_use_tinygemm", False):
            return "a router with a kernel of its own"
        return None if layer.weight.dim() == 2 else "a weight that is no matrix"

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def _replacement(self, kernel: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
        owner = self._class()

        def apply(
            method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = layer.weight.data
            packed = getattr(layer, "use_intel_amx_backend", False) or weight.dim() != 2
            if type(method) is owner and not packed and engine.uses_plain_gemm():
                outer, inner = weight.shape
                rows = x.reshape(-1, inner)
                added = x.new_empty(0) if bias is None else bias.data
                output = x.new_empty(rows.shape[0], outer)
                if kernel(rows, weight, added, output):
                    return output.view(*x.shape[:-1], outer)
                del output  # so that the original's does not come on top of it
            result: torch.Tensor = original(method, layer, x, bias)
            return result

        return apply
