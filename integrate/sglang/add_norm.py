"""SGLang's residual add + RMSNorm: `RMSNorm.forward_cuda`, of every model that uses it.

SGLang's own kernel works in place on both tensors, as the contract says. Other paths of a norm are
not reached: without a residual, the all-reduce that tensor parallel layers fuse with it, and the
norm that also quantises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.sglang import sources
from patcher.integrate.sglang.point import SglangPoint

_FUSED_OP = "sglang.kernels.fused_op"
_LAYERNORM = "sglang.srt.layers.layernorm"


class SglangAddNorm(SglangPoint):
    """Every `RMSNorm` with a residual, a weight, and a mean over the whole row."""

    name: ClassVar[str] = "add_norm"
    op: ClassVar[str] = "fused_add_rms_norm"
    module: ClassVar[str] = _LAYERNORM
    owner: ClassVar[str] = "RMSNorm"
    method: ClassVar[str] = "forward_cuda"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LAYERNORM}:RMSNorm.__init__",
        f"{_LAYERNORM}:RMSNorm.fuse_input_quant",
        f"{_LAYERNORM}:RMSNorm.forward_cuda",
        f"{_LAYERNORM}:_fp8_static_input_scale",
        f"{_FUSED_OP}:BaseFusedOp.forward",
        f"{_FUSED_OP}:BaseFusedOp._resolve_forward_method",
    )

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, self._class())

    def applies(self, layer: Any) -> str | None:
        if type(layer) is not self._class():
            return f"a norm of class {type(layer).__name__}"
        if not layer.has_weight:
            return "no weight"
        if layer.variance_size_override is not None:
            return "a mean over a part of the row"
        if layer.cast_x_before_out_mul:
            return "a row that is rounded before its weight"
        return _quantised(layer._quant_linear)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def _replacement(self, kernel: Dispatcher, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_cuda(
            layer: Any,
            x: torch.Tensor,
            residual: torch.Tensor | None = None,
            post_residual_addition: torch.Tensor | None = None,
            quant_linear: Any = None,
        ) -> Any:
            added = residual is not None and post_residual_addition is None
            plain = added and x.dim() == 2 and x.numel() > 0 and _quantised(quant_linear) is None
            ours = plain and self.applies(layer) is None
            if ours and kernel(x, residual, layer.weight.data, layer.variance_epsilon):
                return x, residual
            return original(layer, x, residual, post_residual_addition, quant_linear)

        return forward_cuda


def _quantised(linear: Any) -> str | None:
    """Why a norm before that projection gives no plain result; None if it does.

    Models name the projection, whatever its weights; SGLang quantises for static FP8 ones.
    """
    scale = sources.module(_LAYERNORM)._fp8_static_input_scale(linear)
    return None if scale is None else "a quantised result"
