"""`linear`: every `torch.nn.Linear` of a model in one call of `linear`, for the few rows that a
step of decode has. The guards leave more rows to PyTorch.

A module is taken if its class has PyTorch's own forward, so that what quantises, adapts or wraps a
layer keeps it. Its weight and bias are looked up at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, why_not_now
from patcher.integrate.transformers.parts import kind_of
from patcher.integrate.transformers.probed import ELSE, ProbedPoint
from patcher.integrate.transformers.swap import Forward

_TOLERANCE = 0.02
"""Of the largest value of a probe: a sum may be rounded to bfloat16."""
_TRIED = 256
"""Outputs at either end that a probe compares, since a vocabulary's weight is large."""


class Linears(ProbedPoint):
    """Replaces the `forward` of linear layers."""

    name: ClassVar[str] = "linear"
    op: ClassVar[str] = "linear"
    role, others = "linear layer", "layers"
    wanted: ClassVar[str] = "of torch.nn.Linear"

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._adapted: set[torch.nn.Module] = set()
        """The modules that an adapter, such as one of PEFT, has around another: its own and that.
        """

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of PyTorch's own forward and of what a module has to compute."""
        return source_digest(torch.nn.Linear.forward, _linear)

    @staticmethod
    def original(*args: Any) -> None:
        _linear(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return isinstance(layer, torch.nn.Linear)

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return self.applies(part) is None

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        reason = self.by_its_class(layer)
        if reason is None and layer in self._adapted:
            reason = "an adapter holds it"
        if reason is None and layer.weight.is_meta:
            reason = "its weight is not in memory"
        return reason or (None if _computes(layer) else ELSE)

    def would_take(self, layer: Any) -> bool:
        """See `ProbedPoint`."""
        return self.by_its_class(layer) is None

    @staticmethod
    def by_its_class(layer: Any) -> str | None:
        """Why a layer is left as it is, by its class and fields, also of a model without weights;
        None if it is taken."""
        kind = kind_of(layer)
        if kind.forward is not torch.nn.Linear.forward:
            return f"{kind.__name__} has a forward of its own"
        if hasattr(layer, "parametrizations"):
            return "its weight is parametrised"
        weight = layer._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return "its weight is no matrix"
        quantised = weight.dtype.itemsize < 2 or not weight.is_floating_point()
        return f"its weight is quantised ({_short(weight)})" if quantised else None

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        return _forward(part, seam, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: one without a bias has no tensor for it."""
        named = {"weight": layer.weight, "bias": layer.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _parts(self) -> list[torch.nn.Module]:
        adapted = (each for each in self.target.modules() if "base_layer" in each._modules)
        self._adapted = {part for each in adapted for part in each.modules()}
        return super()._parts()


def _forward(linear: Any, seam: ForwardPatch, original: Forward) -> Forward:
    none: list[torch.Tensor] = []

    def forward(*args: torch.Tensor, **named: torch.Tensor) -> Any:
        [x] = *args, *named.values()
        weight, bias = linear.weight, linear.bias
        if (refusal := why_not_now(x)) is not None:
            seam.refuse(refusal)
        elif not x.is_contiguous():
            seam.refuse("not contiguous")
        else:
            if bias is None:
                bias = _empty(none, weight)
            output = x.new_empty((*x.shape[:-1], len(weight)))
            rows = x.view(-1, x.shape[-1])
            if seam(rows, weight, bias, output.view(-1, len(weight))):
                return output
        return original(x)

    return forward


def _empty(kept: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The bias of a layer without one, which is made once."""
    if torch.compiler.is_compiling():
        return like.new_empty(0)
    if not kept or kept[0].dtype != like.dtype or kept[0].device != like.device:
        kept[:] = [like.new_empty(0)]
    return kept[0]


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor
) -> None:
    output.copy_(torch.nn.functional.linear(x, weight, bias if bias.numel() else None))


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@torch.no_grad()
def _computes(linear: Any) -> bool:
    """Whether a layer computes on numbers what the op does, with its own weight and bias."""
    weight, bias = linear.weight, linear.bias
    row = torch.linspace(-1.0, 2.0, weight.shape[1], device=weight.device).to(weight.dtype)
    rows = torch.stack([row, row.flip(0)])
    got = torch.nn.Linear.forward(linear, rows)
    if got.shape != (2, len(weight)) or got.dtype != rows.dtype:
        return False
    for part in (slice(None, _TRIED), slice(-_TRIED, None)):
        expected = rows.float() @ weight[part].float().T
        if bias is not None:
            expected += bias[part].float()
        limit = _TOLERANCE * float(expected.abs().max())
        if not torch.allclose(got[:, part].float(), expected, rtol=0, atol=limit):
            return False
    return True
