"""What the points at the quantisation of a layer's input have in common: `QuantFP8.forward`.

The kernel object of a linear layer in fp8 holds a `QuantFP8`, which gives x in fp8 and its scales.
With block scales vLLM runs its CUDA kernel (`+quant_fp8`), else Inductor compiles the same in
PyTorch. The points share one attribute of that class: `quantize_fp8` computes in the place of
either, `rms_norm_quant_fp8` marks where it begins and ends, whatever computes in between.

The contracts have float32 scales row by row. Scales column by column (CUTLASS, DeepGEMM), powers of
two (DeepGEMM) and those packed for Blackwell are left to vLLM. With `linear_fp8` in, a layer that
it takes has them row by row, whatever its backend.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from patcher.bench import VerificationError
from patcher.integrate.guards import dispatches_itself
from patcher.integrate.vllm import sources
from patcher.integrate.vllm.swap import SharedPatch

QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8"
_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm"
_BASES = (
    f"{_KERNELS}.BlockScaledMMLinearKernel:Fp8BlockScaledMMLinearKernel.apply_weights",
    f"{_KERNELS}.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.apply_weights",
)
"""Where kernel objects call their `QuantFP8`."""
PARTS = (
    f"{QUANTISER}:QuantFP8.__init__",
    f"{QUANTISER}:QuantFP8.forward_cuda",
    f"{QUANTISER}:QuantFP8.forward_native",
    f"{QUANTISER}:QuantFP8._quantize_group_native",
    "vllm.model_executor.custom_op:CustomOp.__new__",
    "vllm.model_executor.custom_op:CustomOp.forward",
    "vllm.model_executor.layers.quantization.utils.fp8_utils:per_token_group_quant_fp8",
    *_BASES,
)
COMPUTES = "quantize_fp8"
"""The point whose part is inside of the marks of another."""
LARGEST = 448.0
"""Of float8_e4m3fn."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What `forward` is given besides x, by place and by name: see `bounded`."""
Quantised = tuple[torch.Tensor, torch.Tensor]
"""x in fp8 [tokens, groups * group], and the scales [tokens, groups]."""
Run = Callable[[Any, torch.Tensor, Given], Quantised]
"""Takes the layer, x and what else is given."""
Part = Callable[[Run, Any, torch.Tensor, Given], Quantised]
"""What a point has in `forward`: it is given what is inside of it, too."""


def class_of_quantisers() -> Any:
    """vLLM's `QuantFP8`."""
    return sources.module(QUANTISER).QuantFP8


def quantiser_place(point: str) -> SharedPatch:
    """The place of a point in `QuantFP8.forward`.

    Args:
        point: the name of the patch point.
    """
    return SharedPatch(class_of_quantisers(), "forward", point, _sharing)


def _sharing(original: Any, parts: dict[str, Part]) -> Any:
    kind = class_of_quantisers()

    def own(layer: Any, x: torch.Tensor, given: Given) -> Quantised:
        result: Quantised = original(layer, x, *given[0], **given[1])
        return result

    def computed(layer: Any, x: torch.Tensor, given: Given) -> Quantised:
        inner = parts.get(COMPUTES)
        return own(layer, x, given) if inner is None else inner(own, layer, x, given)

    def forward(layer: Any, x: torch.Tensor, *places: Any, **names: Any) -> Any:
        given = places, names
        # a subclass may have other arguments; a pass of vLLM's compiler draws what it looks for
        drawn = not torch.compiler.is_compiling() and dispatches_itself(x)
        if drawn or type(layer) is not kind:
            return own(layer, x, given)
        for point, part in parts.items():
            if point != COMPUTES:
                return part(computed, layer, x, given)
        return computed(layer, x, given)

    return forward


def bounded(given: Given) -> bool:
    """Whether a scale is given, or a bound of it; `use_triton` follows."""
    places, names = given
    known = *places[:2], names.get("scale"), names.get("scale_ub")
    return any(each is not None for each in known)


def must_be_e4m3() -> None:
    """Refuse a device whose fp8 is another one than the contracts'.

    Raises:
        VerificationError: it is another one.
    """
    found = sources.module("vllm.platforms").current_platform.fp8_dtype()
    if found != torch.float8_e4m3fn:
        raise VerificationError(f"this device has {found}", "revert the patch here")


def kernel_of(layer: Any) -> Any:
    """The kernel object of a linear layer, kept by its method or by the scheme of its loader, which
    holds a quantiser; None if it has none."""
    kind = class_of_quantisers()
    for holder in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
        for held in getattr(holder, "__dict__", {}).values():
            if isinstance(getattr(held, "quant_fp8", None), kind):
                return held
    return None


def quantiser_of(layer: Any) -> Any | str:
    """What quantises the input of a layer for which `kernel_of` is not None; if it is not asked, a
    reason.

    If `linear_fp8` is in, it looks at the layer first: then scales are written row by row.
    """
    kernel = kernel_of(layer)
    taking = getattr(getattr(type(kernel), "apply_block_scaled_mm", None), "point", None)
    taken = taking is not None and taking.applies(layer) is None
    if not getattr(kernel, "apply_input_quant", True):
        return kernel.fallback.quant_fp8 if taken else "a kernel that quantises x itself"
    if type(kernel).apply_weights not in map(sources.part, _BASES):
        return "a kernel that quantises x itself, or not at all"
    return kernel.quant_fp8


def engines_run(quantiser: Any) -> Callable[[torch.Tensor], Quantised]:
    """What quantises in the engine itself, whatever points have in its place: trials are of the
    engine's code, and are no calls of a model."""
    if not isinstance(quantiser, class_of_quantisers()):
        found: Callable[[torch.Tensor], Quantised] = quantiser
        return found
    own = type(quantiser).forward
    return MethodType(getattr(own, "__wrapped__", own), quantiser)


def unlike_quantiser(quantiser: Any, kind: Any) -> str | None:
    """Why a quantiser does not give float32 scales of its own, row by row; None if it does.
    Compilers trace it."""
    if type(quantiser) is not kind:
        return f"a quantisation of class {type(quantiser).__name__}"
    if quantiser.static:
        return "a scale that is given"
    if quantiser.num_token_padding is not None:
        return "rows that are padded"
    if not quantiser.is_group_quant:
        return None if quantiser.use_per_token_if_dynamic else "one scale for all tokens"
    if quantiser.use_ue8m0:
        return "scales that are powers of two"
    return "scales column by column" if quantiser.column_major_scales else None


def by_groups(x: torch.Tensor, output: torch.Tensor, scales: torch.Tensor) -> None:
    """vLLM's own quantisation with a scale for each group: its C kernel, or PyTorch where that
    cannot run.

    Args:
        x: [tokens, groups * group].
        output: the same shape in float8_e4m3fn, written.
        scales: float32 [tokens, groups], written.
    """
    least = 1e-10
    if x.is_cuda and x.is_contiguous():
        group = x.shape[1] // scales.shape[1]
        torch.ops._C.per_token_group_fp8_quant(
            x, output, scales, group, least, -LARGEST, LARGEST, False, False, False
        )
    else:
        _in_pytorch(x, output, scales, least / LARGEST)


def by_tokens(x: torch.Tensor, output: torch.Tensor, scales: torch.Tensor) -> None:
    """vLLM's own quantisation with a scale for each row: see `by_groups`, with one group."""
    if x.is_cuda and x.is_contiguous():
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(output, x, scales, None)
    else:
        _in_pytorch(x, output, scales, 1 / (LARGEST * 512))


def _in_pytorch(x: torch.Tensor, output: torch.Tensor, scales: torch.Tensor, floor: float) -> None:
    parts = x.float().reshape(*scales.shape, -1)
    scales.copy_((parts.abs().amax(-1) / LARGEST).clamp_min(floor))
    numbers = parts / scales.unsqueeze(-1)
    output.copy_(numbers.clamp(-LARGEST, LARGEST).flatten(1))
