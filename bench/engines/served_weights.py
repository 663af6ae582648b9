"""Seeded random weights for a model that vLLM or SGLang has built, in the formats of checkpoints.

Their own `dummy` weights are near zero: all tokens pick the same experts, and decode reads a
fraction of what a real model reads. Here matrices have the spread of `random_weights`, whatever
their format, so that routing is spread out and activations stay sane through all layers:

- bfloat16, float16 and float32;
- 8-bit floats, with a scale for a tensor, for its rows or for blocks (`weight_scale_inv`);
- MXFP4, packed in bytes, with powers of two as scales;
- 4- and 8-bit integers packed in int32 or in bytes, as GPTQ and AWQ have them, and int8.

A matrix is quantised by making codes of a known spread, and scales that bring it to the one wanted.
Read against vLLM 0.25.1 to 0.33.0, whose layers and names SGLang 0.5.23 has from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from patcher.bench.engines.random_weights import STD, added_spread, spread_of
from patcher.bench.errors import UsageError

FLOAT8_SPREAD = 64.0
"""Of 8-bit float codes: their largest, 448, is seven times as far out."""
FLOAT4_SPREAD = math.sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)
"""Of random 4-bit float codes: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign."""
INPUT_SCALE = 8 / 448
"""Of 8-bit activations, of which 8 becomes the largest code; behind a norm they are about 1."""
_BIASED_ONE = 127
"""The exponent's byte of a power-of-two scale of 1."""
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_KV_SCALES = {"q_scale", "k_scale", "v_scale", "prob_scale"}
_ROWS = 4096
"""Rows that are made at once where PyTorch cannot fill a format directly."""


@dataclass(frozen=True)
class LayerTypes:
    """An engine's classes of layers whose matrices have another spread than their names say."""

    embedding: type
    head: type
    """The output projection; it may be a kind of `embedding`."""
    adds: type
    """Linear layers whose output is added to the residual stream."""
    gemma_norm: type
    """Norms that multiply by one more than their weight."""


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, types: LayerTypes) -> None:
    """Fill a model with seeded random weights.

    A tensor-parallel rank makes its shards from the same seed, and layers that every rank has whole
    are the same on each. A model whose head is its embedding picks its last token again and again:
    its time is right, but a check of quality then says little.

    Args:
        model: as the engine built it, before it processes the weights.
        seed: of the generator.
        types: the engine's classes.

    Raises:
        UsageError: a parameter has a format that is not known here; the message names it.
    """
    spreads = _spreads(model, types)
    generator: torch.Generator | None = None
    for name, layer, leaf, parameter in _parameters(model):
        if parameter.is_meta:
            raise _unknown(name, "is quantised while it is loaded")
        if generator is None:
            generator = torch.Generator(device=parameter.device).manual_seed(seed)
        if leaf in _KV_SCALES:
            continue  # an engine takes 1 for what a checkpoint does not say
        neutral = _neutral(name, layer, leaf, parameter, types)
        if neutral is not None:
            parameter.fill_(neutral)
        else:
            _fill(name, layer, leaf, parameter, spreads[name], generator)


def _parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Each parameter once: its name, its layer, its name there, itself."""
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{leaf}" if prefix else leaf, layer, leaf, parameter


def _spreads(model: torch.nn.Module, types: LayerTypes) -> dict[str, float]:
    """The standard deviation of each matrix, by its name and by what its layer is for."""
    names = [name for name, *_ in _parameters(model)]
    spreads, added = spread_of(names), added_spread(names)
    for name, layer, *_ in _parameters(model):
        if isinstance(layer, types.head):
            spreads[name] = STD
        elif isinstance(layer, types.embedding):
            spreads[name] = 1.0
        elif isinstance(layer, types.adds):
            spreads[name] = added
    return spreads


def _fill(
    name: str,
    layer: torch.nn.Module,
    leaf: str,
    parameter: torch.Tensor,
    spread: float,
    generator: torch.Generator,
) -> None:
    """Give a parameter its values; see the module's docstring."""
    if leaf.endswith("input_scale"):
        parameter.fill_(INPUT_SCALE)
    elif "scale" in leaf:
        _fill_scale(name, layer, leaf, parameter, spread)
    elif parameter.dtype in _FLOAT8:
        for part in torch.split(parameter, _ROWS if parameter.dim() == 2 else 1):
            codes = torch.empty(part.shape, device=part.device)
            codes.normal_(0.0, FLOAT8_SPREAD, generator=generator)
            part.copy_(codes.clamp_(-7 * FLOAT8_SPREAD, 7 * FLOAT8_SPREAD))
    elif parameter.is_floating_point():
        parameter.normal_(0.0, spread, generator=generator)
    elif leaf.endswith("qzeros"):
        parameter.view(torch.uint8).fill_(0x88 if _bits(name, layer) == 4 else 0x80)
    elif leaf.endswith("g_idx"):
        groups = layer.get_parameter(_sibling(leaf, "g_idx", "scales")).shape[-2]
        parameter.copy_(torch.arange(parameter.shape[-1]) * groups // parameter.shape[-1])
    elif leaf.endswith("g_idx_sort_indices"):
        parameter.copy_(torch.arange(parameter.shape[-1]))
    elif _is_codes(leaf, parameter):
        parameter.view(torch.uint8).random_(0, 256, generator=generator)
    else:
        raise _unknown(name, f"is {_words(parameter.dtype)}")


def _neutral(
    name: str, layer: torch.nn.Module, leaf: str, parameter: torch.Tensor, types: LayerTypes
) -> float | None:
    """The value of what must not be random: norms, and the bias that balances experts."""
    told: float | None = getattr(parameter, "dummy_weight_value", None)  # from 0.33.0 on
    if told is not None and parameter.is_floating_point():
        return told
    if leaf == "e_score_correction_bias":
        return 0.0
    if "norm" not in name or not parameter.is_floating_point():
        return None
    return 0.0 if leaf == "bias" or isinstance(layer, types.gemma_norm) else 1.0


def _fill_scale(
    name: str, layer: torch.nn.Module, leaf: str, parameter: torch.Tensor, spread: float
) -> None:
    """Scales that bring the codes of a layer's matrix to the spread that it should have."""
    of = _sibling(leaf, r"weight_scale(_inv)?", "weight")
    of = _sibling(of, "scales", "qweight")
    codes = dict(layer.named_parameters(recurse=False)).get(of)
    if codes is None or of == leaf:
        raise _unknown(name, "is a scale of no matrix that is known here")
    if codes.dtype in _FLOAT8:
        wanted = spread / FLOAT8_SPREAD
    elif codes.dtype == torch.uint8 and not of.endswith("qweight"):
        wanted = spread / FLOAT4_SPREAD
    elif codes.dtype == torch.int8:
        wanted = spread / _integer_spread(8)
    elif _is_codes(of, codes):
        wanted = spread / _integer_spread(_bits(name, layer))
    else:
        raise _unknown(name, f"is the scale of a matrix in {_words(codes.dtype)}")
    if parameter.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = round(math.log2(wanted))
        parameter.view(torch.uint8).fill_(_BIASED_ONE + exponent)
    elif parameter.dtype in _FLOAT8:
        raise _unknown(name, "is a scale that has a scale itself")
    else:
        parameter.fill_(wanted)


def _is_codes(leaf: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a quantised matrix of integers or of packed bits."""
    if parameter.dtype in (torch.uint8, torch.int8):
        return leaf.endswith("weight")
    return parameter.dtype == torch.int32 and leaf.endswith("qweight")


def _bits(name: str, layer: Any) -> int:
    """Bits of one integer of a matrix that is packed in int32, or in bytes."""
    config = getattr(getattr(layer, "quant_method", None), "quant_config", None)
    packed = getattr(config, "pack_factor", None)
    if packed in (4, 8):
        return 32 // int(packed)
    bits = getattr(config, "weight_bits", None)
    if bits not in (4, 8):
        raise _unknown(name, "is packed in a way that its layer does not tell")
    return int(bits)


def _integer_spread(bits: int) -> float:
    """Of integers of which each is as likely."""
    return math.sqrt((4**bits - 1) / 12)


def _sibling(leaf: str, ending: str, other: str) -> str:
    return re.sub(f"{ending}$", other, leaf)


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unknown(name: str, why: str) -> UsageError:
    return UsageError(
        f"there are no random weights for {name}, which {why}",
        "use --weights hub or local, or a model in bfloat16, fp8, MXFP4, GPTQ or AWQ",
    )
