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

STD = 0.02
"""Standard deviation of a matrix that reads the residual stream."""
_EMBEDS = re.compile(r"(^|\.)((word_|tok_)?embed|wte\.)")
_ADDS = re.compile(r"(^|\.)(o_proj|out_proj|c_proj|down_proj|dense_4h_to_h|fc2|wo|w2)(_|\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


def spread_of(names: Iterable[str]) -> dict[str, float]:
    """Standard deviation of each parameter, by name; norms are ignored by the callers.

    Names are those of transformers, vLLM and SGLang: `embed_tokens`, `embedding` or `wte`; `o_proj`
    and `down_proj`, `w2_weight` or another name of a matrix that adds to the residual stream.
    """
    every = list(names)
    added = added_spread(every)

    def spread(name: str) -> float:
        if _EMBEDS.search(name):
            return 1.0
        return added if _ADDS.search(name) else STD

    return {name: spread(name) for name in every}


def added_spread(names: Iterable[str]) -> float:
    """Standard deviation of a matrix whose output is added to the residual stream.

    Args:
        names: of all parameters of the model, which tell its number of layers.
    """
    layers = {match[1] for name in names if (match := _LAYER.search(name))}
    return STD / math.sqrt(2 * max(len(layers), 1))
