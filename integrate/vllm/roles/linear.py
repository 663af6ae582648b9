"""vLLM's matmuls with plain weights: linear layers, and the vocabulary's output matrix.

Both are one method of a class that many layers share: `UnquantizedLinearMethod.apply` and
`UnquantizedEmbeddingMethod.apply`. The replacement is an operator that Inductor does not decompose,
as it does not decompose cuBLAS's call. A layer without bias passes an empty one; so does
`RowParallelLinear` on all ranks but the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import AttributePatch

_LINEAR = "vllm.model_executor.layers.linear"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_UTILS = "vllm.model_executor.layers.utils"


class _Matmul(VllmPoint):
    """A patch point at `apply` of a method without quantisation."""

    op: ClassVar[str] = "linear"
    module: ClassVar[str]
    layer: ClassVar[str]
    """The class of the layers, in that module."""
    method: ClassVar[str]
    """The class of their method, in that module."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        self._target().must_be_the_engines()
        engine.must_allow_another("matmul")
        return f"{self.module}.{self.method}.apply"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, getattr(sources.module(self.module), self.layer))

    def applies(self, layer: Any) -> str | None:
        method = layer.quant_method
        if type(method) is not self._target().owner:
            return f"weights by {type(method).__name__}"
        if engine.gemm_of(method) not in engine.plain_gemms():
            return "another matmul of linear_backend"
        if engine.has_router_kernel(layer):
            return "a router with a kernel of its own"
        return None if layer.weight.dim() == 2 else "a weight that is no matrix"

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        return {"weight": layer.weight.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        swap = self._target()
        method, original = swap.owner, swap.original
        operator = kernel.op(_by_columns, _by_rows)
        plain = engine.plain_gemms()

        def apply(
            self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            weight = layer.weight.data
            ours = type(self) is method and engine.gemm_of(self) in plain
            if not ours or weight.dim() != 2:
                result: torch.Tensor = original(self, layer, x, bias)
                return result
            outer, inner = weight.shape
            rows = x.reshape(-1, inner)  # `model_impl="transformers"` has an axis for the batch
            output = x.new_empty(rows.shape[0], outer)
            # transposed, since compiled code passes a view as a plain tensor: vLLM's class of
            # weights has a `__torch_function__`, by which each call would go through Python twice
            operator(rows, weight.t(), x.new_empty(0) if bias is None else bias.data, output)
            return output.view(*x.shape[:-1], outer)

        swap.install(apply)
        self._swaps = [swap]
        self.name_lost_fusions()

    def _target(self) -> AttributePatch:
        return AttributePatch(getattr(sources.module(self.module), self.method), "apply")


class Linear(_Matmul):
    """Every linear layer whose weight is a plain matrix."""

    name: ClassVar[str] = "linear"
    module: ClassVar[str] = _LINEAR
    layer: ClassVar[str] = "LinearBase"
    method: ClassVar[str] = "UnquantizedLinearMethod"
    fusions: ClassVar[tuple[str, ...]] = ("fuse_gemm_comms",)
    parts: ClassVar[tuple[str, ...]] = (
        f"{_LINEAR}:UnquantizedLinearMethod.__init__",
        f"{_LINEAR}:UnquantizedLinearMethod.create_weights",
        f"{_LINEAR}:UnquantizedLinearMethod.apply",
        f"{_UTILS}:dispatch_unquantized_gemm",
        f"{_UTILS}:default_unquantized_gemm",
    )

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        weight = layer.weight.data
        module = sources.module(self.module)
        elsewhere = isinstance(layer, module.RowParallelLinear) and layer.tp_rank > 0
        bias = None if layer.skip_bias_add or elsewhere else layer.bias
        return {"weight": weight, "bias": weight.new_empty(0) if bias is None else bias.data}


class LmHead(_Matmul):
    """The vocabulary's output matrix, once a step."""

    name: ClassVar[str] = "lm_head"
    module: ClassVar[str] = _EMBEDDING
    layer: ClassVar[str] = "ParallelLMHead"
    method: ClassVar[str] = "UnquantizedEmbeddingMethod"
    parts: ClassVar[tuple[str, ...]] = (
        f"{_EMBEDDING}:UnquantizedEmbeddingMethod.create_weights",
        f"{_EMBEDDING}:UnquantizedEmbeddingMethod.apply",
        f"{_UTILS}:dispatch_unquantized_gemm",
        f"{_UTILS}:default_unquantized_gemm",
    )


def _by_rows(
    x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The contract's arguments from those of the operator, whose weight is [inner, outer]."""
    return x, columns.t(), bias, output


def engines_own(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> None:
    """`torch.nn.functional.linear` into an existing tensor, by the same call of cuBLASLt."""
    _by_columns(x, weight.t(), bias, output)


def _by_columns(
    x: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> None:
    """The same with a weight [inner, outer]."""
    if bias.numel():
        torch.addmm(bias, x, columns, out=output)
    else:
        torch.mm(x, columns, out=output)
