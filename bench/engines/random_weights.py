"""Random weights under which rounding does what it does in a trained model.

Where every matrix is normal(0, 0.02), the first layer adds many times what the embedding is, all
later ones amplify each rounding error, and the model forgets its tokens: positions pick what others
pick, and bfloat16 and float32 agree on few picks. Then what a patched kernel gets wrong drowns in
what rounding does. So embeddings are normal(0, 1), and the matrices whose output a layer adds to
the stream are smaller by the square root of how many there are (Radford et al., Language models are
unsupervised multitask learners, 2019, section 2.3). `tests/test_random_weights.py` holds both
against each other. A kernel's time hangs on weights only by which experts they pick, which is
reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

STD = 0.02
"""Of a matrix that reads the stream."""
_EMBEDS = re.compile(r"(^|\.)embed")
_ADDS = re.compile(r"(^|\.)(o_proj|down_proj|w2)(_|\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def spread_of(names: Iterable[str]) -> dict[str, float]:
    """Standard deviation of each parameter that is no norm, by the names of transformers and vLLM:
    `embed_tokens` or `embedding`; `o_proj` and `down_proj` or `w2_weight`.
    """
    every = list(names)
    layers = {found[1] for name in every if (found := _LAYER.search(name))}
    added = STD / math.sqrt(2 * max(len(layers), 1))

    def spread(name: str) -> float:
        if _EMBEDS.search(name):
            return 1.0
        return added if _ADDS.search(name) else STD

    return {name: spread(name) for name in every}
