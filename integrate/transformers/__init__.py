"""Patch points in Hugging Face transformers: of gpt-oss, and of the norms of any model.

They work eagerly, or compiled with a static cache. A patch point patches an existing model by
replacing forwards of its modules. Without a model, one of gpt-oss patches every model built
afterwards: by the constructor of its body, or by transformers' registry of experts functions.
"""

from __future__ import annotations

from patcher.integrate.points import PatchPoint
from patcher.integrate.transformers.decoder_layer import GptOssDecoderLayers
from patcher.integrate.transformers.experts import GptOssExpertsFunction
from patcher.integrate.transformers.norm import RmsNorms
from patcher.integrate.transformers.rotary import GptOssRotaryEmbedding
from patcher.integrate.transformers.router import GptOssRouters

POINTS: dict[str, type[PatchPoint]] = {
    point.name: point
    for point in (
        GptOssDecoderLayers,
        GptOssExpertsFunction,
        GptOssRotaryEmbedding,
        GptOssRouters,
        RmsNorms,
    )
}
"""Patch points of this engine, by name."""
