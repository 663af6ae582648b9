"""The quantisation of a layer's input to fp8 with block scales: `QuantFP8.forward`.

One operator that Inductor does not decompose takes the place of vLLM's CUDA kernel, or of what
Inductor compiles. So the passes that fuse it with the norm or the activation before it
(`fuse_norm_quant`, `fuse_act_quant`, on by default with block scales) no longer find it, which a
warning says.

It stands beside `linear_fp8`, whose matmul is given an x that is quantised by then. One scale for a
whole token is another kernel of vLLM's with another least scale, and stays vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles.quantiser import (
    COMPUTES,
    LARGEST,
    PARTS,
    QUANTISER,
    Given,
    Quantised,
    Run,
    bounded,
    by_groups,
    class_of_quantisers,
    engines_run,
    kernel_of,
    must_be_e4m3,
    quantiser_of,
    quantiser_place,
    unlike_quantiser,
)
from patcher.integrate.vllm.roles.tried import left_to_the_engine, rows_of


class QuantizeFp8(VllmPoint):
    """Every `QuantFP8` that gives each block of a row a float32 scale, row by row."""

    name: ClassVar[str] = COMPUTES
    op: ClassVar[str] = "quantize_fp8"
    fusions: ClassVar[tuple[str, ...]] = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
    parts: ClassVar[tuple[str, ...]] = PARTS

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._left: list[Any] = []
        """Quantisers that failed the trial and have vLLM's forward as their own attribute."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        quantiser_place(self.name).must_have_room()
        engine.must_not_be_replaced("QuantFP8")
        engine.must_allow_another("quantisation")
        must_be_e4m3()
        return f"{QUANTISER}.QuantFP8.forward"

    def of_role(self, layer: Any) -> bool:
        return kernel_of(layer) is not None

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. A quantiser that fails the trial gets vLLM's forward back."""
        found = quantiser_of(layer)
        if isinstance(found, str):
            return found
        if reason := _unlike(found, class_of_quantisers()):
            return reason
        if sources.module("vllm.platforms").current_platform.is_cuda() and not layer.weight.is_cuda:
            return "an offloaded weight"
        own = engines_run(found)
        if _computes(own, found.group_size, layer.weight.device):
            self._give_back(found)
            return None
        if self._swaps and found not in self._left:
            found.forward = own
            self._left.append(found)
        return "it computes something else"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = quantiser_place(self.name)
        place.install(_part(kernel))
        self._swaps = [place]
        self.name_lost_fusions()

    def remove(self) -> None:
        for quantiser in list(self._left):
            self._give_back(quantiser)
        super().remove()

    def _give_back(self, quantiser: Any) -> None:
        if quantiser in self._left:
            self._left.remove(quantiser)
            vars(quantiser).pop("forward", None)


def _unlike(quantiser: Any, kind: Any) -> str | None:
    reason = unlike_quantiser(quantiser, kind)
    if reason is None and not quantiser.is_group_quant:
        return "one scale for a whole token"
    return reason


def _part(kernel: Dispatcher) -> Any:
    operator, kind = kernel.op(by_groups), class_of_quantisers()
    count_bounded = left_to_the_engine(kernel, "a scale that is given or bounded")
    count_odd = left_to_the_engine(kernel, "rows that blocks do not fill, or without one pitch")

    def part(own: Run, layer: Any, x: torch.Tensor, given: Given) -> Quantised:
        if _unlike(layer, kind) is not None:
            return own(layer, x, given)
        if bounded(given):
            count_bounded()
            return own(layer, x, given)
        rows, group = rows_of(x), layer.group_size
        if rows is None or x.shape[-1] % group:
            count_odd()
            return own(layer, x, given)
        groups = x.shape[-1] // group
        output = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((rows.shape[0], groups), dtype=torch.float32, device=x.device)
        operator(rows, output, scales)
        return output.view(x.shape), scales.view(*x.shape[:-1], groups)

    return part


@torch.no_grad()
def _computes(own: Callable[[torch.Tensor], Quantised], group: int, device: torch.device) -> bool:
    """Whether vLLM's own forward gives two rows of numbers as the contract has them."""
    row = torch.linspace(-1.0, 2.0, 2 * group, device=device)
    rows = torch.stack([row, 30 * row.flip(0)]).bfloat16()
    found, scales = own(rows)
    wide = rows.float().view(2, 2, group)
    factors = wide.abs().amax(-1) / LARGEST
    if scales.shape != factors.shape or scales.dtype != torch.float32:
        return False
    numbers, expected = found.float().view(2, 2, group), wide / factors.unsqueeze(-1)
    # three bits of mantissa, and the finest step of fp8
    return torch.allclose(scales, factors, rtol=1e-3) and torch.allclose(
        numbers, expected, rtol=2**-4, atol=2**-9
    )
