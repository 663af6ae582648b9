"""Random weights with which rounding errors behave as in a trained model.

If every matrix is normal(0, 0.02), the first layer adds many times the embedding, and all later
layers amplify each rounding error. The model then forgets its tokens: different positions select
the same tokens, and bfloat16 and float32 agree on few. Rounding would then hide the errors of a
patched kernel. So embeddings are normal(0, 1), and matrices whose output is added to the
residual stream are scaled down by the square root of their number (Radford et al., Language models
are unsupervised multitask learners, 2019, section 2.3). The tests of this module compare both.
Weights affect a kernel's time only through the selection of experts, which is reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch

from patcher.bench.errors import UsageError

STD = 0.02
"""Standard deviation of a matrix that reads the residual stream."""
MXFP4_SCALE = 120
"""Biased exponent of a block of MXFP4 weights: 2^-7, which gives a spread like normal(0, `STD`)."""
_EMBEDS = re.compile(r"(^|\.)embed")
_ADDS = re.compile(r"(^|\.)(o_proj|down_proj|w2)(_|\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def spread_of(names: Iterable[str]) -> dict[str, float]:
    """Standard deviation of each parameter, by name; norms are ignored by the callers.

    Names are those of transformers, vLLM and SGLang: `embed_tokens` or `embedding`; `o_proj` and
    `down_proj` or `w2_weight`.
    """
    every = list(names)
    layers = {match[1] for name in every if (match := _LAYER.search(name))}
    added = STD / math.sqrt(2 * max(len(layers), 1))

    def spread(name: str) -> float:
        if _EMBEDS.search(name):
            return 1.0
        return added if _ADDS.search(name) else STD

    return {name: spread(name) for name in every}


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill a model with seeded random weights.

    Weights are normal as `spread_of` says, and norms are one. Packed MXFP4 blocks are
    random bytes, with scales of `MXFP4_SCALE`, lowered by powers of two for smaller matrices.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    spread = spread_of(name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif parameter.is_floating_point():
            parameter.normal_(0.0, spread[name], generator=generator)
        elif parameter.dtype == torch.uint8 and "scale" in name:
            parameter.fill_(MXFP4_SCALE + round(math.log2(spread[name] / STD)))
        elif parameter.dtype == torch.uint8:
            parameter.random_(0, 256, generator=generator)
        else:
            raise UsageError(
                f"cannot make random weights for {name} ({parameter.dtype})",
                "use --weights hub or local",
            )
