"""vLLM's linear layers without quantisation: `UnquantizedLinearMethod.apply`, of every such layer.

gpt-oss has three of them in each layer: qkv_proj, o_proj and the router. The replacement is an
operator that Inductor does not decompose, as it does not decompose cuBLAS's call. Two kinds keep
vLLM's own code: layers without bias, which include `RowParallelLinear` on all ranks but the first,
and the vocabulary's output matrix, which is not a linear layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LINEAR = "vllm.model_executor.layers.linear"
_UTILS = "vllm.model_executor.layers.utils"


class Linear(VllmPoint):
    """Every linear layer with bias whose weight is a plain matrix."""

    name: ClassVar[str] = "linear"
    op: ClassVar[str] = "linear"
    layers: ClassVar[tuple[str, ...]] = ("RowParallelLinear|ColumnParallelLinear|ReplicatedLinear",)
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LINEAR}:UnquantizedLinearMethod.__init__",
        f"{_LINEAR}:UnquantizedLinearMethod.create_weights",
        f"{_LINEAR}:UnquantizedLinearMethod.apply",
        f"{_UTILS}:dispatch_unquantized_gemm",
        f"{_UTILS}:default_unquantized_gemm",
    )

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        AttributePatch(
            sources.module(_LINEAR).UnquantizedLinearMethod, "apply"
        ).must_be_the_engines()
        if sources.module("vllm.envs").VLLM_BATCH_INVARIANT:
            raise VerificationError(
                "VLLM_BATCH_INVARIANT requires vLLM's own matmul", "unset it, or revert the patch"
            )
        return f"{_LINEAR}.UnquantizedLinearMethod.apply"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        method = sources.module(_LINEAR).UnquantizedLinearMethod
        swap = AttributePatch(method, "apply")
        original = swap.original
        operator = kernel.op(engines_own)
        plain = engine.plain_gemms()

        def apply(
            self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = layer.weight.data
            ours = type(self) is method and engine.gemm_of(self) in plain
            if not ours or bias is None or x.dim() != 2 or weight.dim() != 2:
                result: torch.Tensor = original(self, layer, x, bias)
                return result
            output = x.new_empty(x.shape[0], weight.shape[0])
            operator(x, weight, bias.data, output)
            return output

        swap.install(apply)
        self._swaps = [swap]


def engines_own(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> None:
    """`torch.nn.functional.linear` into an existing tensor, by the same call of cuBLASLt."""
    torch.addmm(bias, x, weight.t(), out=output)
