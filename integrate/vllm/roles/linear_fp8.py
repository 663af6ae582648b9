"""vLLM's linear layers in fp8 with block scales: the matmul of an x that is quantised by then.

The method of such a layer (`Fp8LinearMethod`, or another loader's) keeps a kernel object, one for
each layer. Its `apply_weights` quantises x and calls `apply_block_scaled_mm`, which is replaced in
the classes that leave the weight and its scales as a checkpoint has them; see `fp8_backends`. So
what vLLM's compiler fuses with the quantisation (norms, activations) stays fused.

Some backends want the scales of x column by column. In a layer that the patch takes they are
written row by row, as the contract has them, and turned for the calls that stay with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, ClassVar

import torch

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles.fp8_backends import BACKENDS, PARTS
from patcher.integrate.vllm.roles.quantiser import engines_run
from patcher.integrate.vllm.swap import AttributePatch

_LINEAR = "vllm.model_executor.layers.linear"
_TOLERANCE = 0.02
"""Of an output, relative; half of it, of the largest one."""


class LinearFp8(VllmPoint):
    """Linear layers whose blocks of weights have one float32 scale each."""

    name: ClassVar[str] = "linear_fp8"
    op: ClassVar[str] = "linear_fp8"
    fusions: ClassVar[tuple[str, ...]] = ("fuse_gemm_comms",)
    parts: ClassVar[tuple[str, ...]] = PARTS

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._left: list[Any] = []
        """Kernel objects that have the engine's matmul as their own attribute."""
        self._by_rows: dict[Any, tuple[bool, bool]] = {}
        """Quantisers that write scales row by row now, and how they wrote them before."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        places = _places()
        for place in places:
            place.must_be_the_engines()
        engine.must_allow_another("matmul")
        return f"apply_block_scaled_mm of {', '.join(place.owner.__name__ for place in places)}"

    def of_role(self, layer: Any) -> bool:
        return (
            isinstance(layer, sources.module(_LINEAR).LinearBase) and _kernel_of(layer) is not None
        )

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. A layer that fails the trial gets the engine's matmul back."""
        kernel = _kernel_of(layer)
        if all(type(kernel) is not place.owner for place in _places()):
            return f"weights by {type(kernel).__name__}"
        if _block_of(kernel) is None:
            return "blocks that are no squares, or not those of x"
        weight, scale = self.constants(layer).values()
        if not _is_plain(kernel, weight, scale):
            return f"a weight in another layout: {_shown(weight)}, scales {_shown(scale)}"
        self._write_as_before(_quantising(kernel).quant_fp8)  # the trial is of vLLM's own matmul
        reason = _trial(kernel, weight, scale)
        if not self._swaps:
            return reason
        if reason is None:
            self._give_back(kernel)
            self._write_by_rows(_quantising(kernel).quant_fp8)
        elif kernel not in self._left:
            engines = type(kernel).apply_block_scaled_mm.__wrapped__
            kernel.apply_block_scaled_mm = MethodType(engines, kernel)
            self._left.append(kernel)
        return reason

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        found = _kernel_of(layer)._get_layer_params(layer)
        scale = found.weight_scale if found.weight_scale_inv is None else found.weight_scale_inv
        return {"weight": found.weight.data, "weight_scale": scale.data}

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        for place, backend in zip(_places(), BACKENDS, strict=True):
            replacement = _replacement(place, kernel.op(backend.engines_own))
            replacement.point = self  # for points that ask how scales of x will be written
            place.install(replacement)
            self._swaps.append(place)
        self.name_lost_fusions()

    def remove(self) -> None:
        for kernel in list(self._left):
            self._give_back(kernel)
        for quantiser in list(self._by_rows):
            self._write_as_before(quantiser)
        super().remove()

    def _give_back(self, kernel: Any) -> None:
        if kernel in self._left:
            self._left.remove(kernel)
            vars(kernel).pop("apply_block_scaled_mm", None)

    def _write_by_rows(self, quantiser: Any) -> None:
        if quantiser.column_major_scales:
            before = quantiser.column_major_scales, quantiser.tma_aligned_scales
            self._by_rows[quantiser] = before
            quantiser.column_major_scales = quantiser.tma_aligned_scales = False

    def _write_as_before(self, quantiser: Any) -> None:
        if before := self._by_rows.pop(quantiser, None):
            quantiser.column_major_scales, quantiser.tma_aligned_scales = before


def _places() -> list[AttributePatch]:
    """The method of each backend, in their order."""
    return [
        AttributePatch(getattr(sources.module(one.module), one.kernel), "apply_block_scaled_mm")
        for one in BACKENDS
    ]


def _kernel_of(layer: Any) -> Any:
    """The kernel object of a layer in fp8, kept by its method or by the scheme of its loader; None
    for any other layer."""
    for holder in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
        found = getattr(holder, "fp8_linear", None)
        if found is not None:
            return found
    return None


def _quantising(kernel: Any) -> Any:
    """The kernel object that quantises x: a kernel that is given x as it is keeps another one for
    many rows."""
    return kernel if kernel.apply_input_quant else kernel.fallback


def _block_of(kernel: Any) -> int | None:
    """The size of a block, where those of the weight are squares and those of x are as long."""
    rows, columns = kernel.weight_group_shape
    given = kernel.config.activation_quant_key.scale.group_shape
    same = rows == columns == given[1] and given[0] == 1 and rows > 0
    return int(rows) if same else None


def _is_plain(kernel: Any, weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a weight and its scales are as in the contract. Compilers trace it."""
    block = _block_of(kernel)
    if block is None or weight.dim() != 2 or scale.dim() != 2 or scale.dtype != torch.float32:
        return False
    outer, inner = weight.shape
    fits = scale.shape[0] == (outer + block - 1) // block and scale.shape[1] * block == inner
    # vLLM runs another kernel of CUTLASS's backend for odd sizes
    return fits and weight.dtype == torch.float8_e4m3fn and outer % 16 == 0 and inner % 16 == 0


def _replacement(place: AttributePatch, operator: Any) -> Any:
    kind, original = place.owner, place.original

    def apply_block_scaled_mm(
        kernel: Any, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        weight, weight_scale = B.data, Bs.data
        if type(kernel) is kind and _is_plain(kernel, weight, weight_scale):
            x, x_scale = (A, As) if kernel.apply_input_quant else kernel.fallback.quant_fp8(A)
            if x_scale.dtype == torch.float32:
                shape = x.shape[0], weight.shape[0]
                output = torch.empty(shape, dtype=kernel.config.out_dtype, device=x.device)
                operator(x, x_scale.contiguous(), weight, weight_scale, output)
                return output
        result: torch.Tensor = original(kernel, A, B, As, Bs)
        return result

    return apply_block_scaled_mm


@torch.no_grad()
def _trial(kernel: Any, weight: torch.Tensor, scale: torch.Tensor) -> str | None:
    """Why a layer's matmul is not the op's, by its first and its last block of outputs for two
    rows; None if it is."""
    if sources.module("vllm.platforms").current_platform.is_cuda() and not weight.is_cuda:
        return "an offloaded weight"
    block, multiplying = _block_of(kernel), _quantising(kernel)
    assert block is not None
    row = torch.linspace(-1.0, 2.0, weight.shape[1], device=weight.device)
    rows = torch.stack([row, 30 * row.flip(0)]).to(kernel.config.out_dtype)
    x, x_scale = engines_run(multiplying.quant_fp8)(rows)
    if x_scale.dtype != torch.float32:
        return f"scales of x {_shown(x_scale)}"
    engines = type(multiplying).apply_block_scaled_mm
    got = getattr(engines, "__wrapped__", engines)(multiplying, x, weight, x_scale, scale)
    last = (len(weight) - 1) // block
    for number in dict.fromkeys((0, last)):
        part = slice(number * block, (number + 1) * block)
        given = {"weight": weight[part], "weight_scale": scale[number : number + 1]}
        found = got[:, part].double()
        [expected] = (
            load_op(LinearFp8.op).reference(x=x, x_scale=x_scale, output=found, **given).values()
        )
        floor = _TOLERANCE * expected.abs().amax().item() / 2
        if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=floor):
            return "it computes something else"
    return None


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
