"""The patch points of transformers by name."""

from __future__ import annotations

from patcher.integrate.points import PatchPoint
from patcher.integrate.transformers.add_norm import AddNorms
from patcher.integrate.transformers.decoder_layer import GptOssDecoderLayers
from patcher.integrate.transformers.experts import GptOssExpertsFunction
from patcher.integrate.transformers.experts_sum import ExpertsSums
from patcher.integrate.transformers.experts_whole import ExpertsWhole
from patcher.integrate.transformers.gated_mlp import GatedMlps
from patcher.integrate.transformers.linear import Linears
from patcher.integrate.transformers.norm import GemmaRmsNorms, RmsNorms
from patcher.integrate.transformers.rotary import GptOssRotaryEmbedding
from patcher.integrate.transformers.rotation import Rotations
from patcher.integrate.transformers.router import GptOssRouters
from patcher.integrate.transformers.topk_router import Routers

POINTS: dict[str, type[PatchPoint]] = {
    point.name: point
    for point in (
        RmsNorms,
        GemmaRmsNorms,
        AddNorms,
        GatedMlps,
        Linears,
        Routers,
        Rotations,
        ExpertsSums,
        ExpertsWhole,
        GptOssDecoderLayers,
        GptOssExpertsFunction,
        GptOssRotaryEmbedding,
        GptOssRouters,
    )
}
"""Patch points of this engine, by name."""
