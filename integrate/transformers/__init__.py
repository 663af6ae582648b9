"""Patch points in Hugging Face transformers' gpt-oss: eager, compiled with a static cache.

Each is for a model that is built, by forwards on its instances, or, without one, for the models
that are built from now on: by the constructor of their body, and by transformers' own registry of
experts functions.
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
