"""Patch points in Hugging Face transformers' gpt-oss: eager, or compiled with a static cache.

A patch point patches an existing model by replacing forwards of its modules. Without a model, it
patches every model built afterwards: by the constructor of its body, or by transformers' registry
of experts functions.
"""

from __future__ import annotations

from patcher.integrate.points import PatchPoint
from patcher.integrate.transformers.decoder_layer import GptOssDecoderLayers
from patcher.integrate.transformers.experts import GptOssExpertsFunction
from patcher.integrate.transformers.rotary import GptOssRotaryEmbedding
from patcher.integrate.transformers.router import GptOssRouters

POINTS: dict[str, type[PatchPoint]] = {
    point.name: point
    for point in (GptOssDecoderLayers, GptOssExpertsFunction, GptOssRotaryEmbedding, GptOssRouters)
}
"""Patch points of this engine, by name."""
