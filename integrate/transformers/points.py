"""The patch points of transformers by name."""

from __future__ import annotations

from patcher.integrate.points import PatchPoint
from patcher.integrate.transformers.roles.add_norm import AddNorms
from patcher.integrate.transformers.roles.experts_sum import ExpertsSums
from patcher.integrate.transformers.roles.experts_whole import ExpertsWhole
from patcher.integrate.transformers.roles.gated_mlp import GatedMlps
from patcher.integrate.transformers.roles.gpt_oss_decoder_layer import GptOssDecoderLayers
from patcher.integrate.transformers.roles.gpt_oss_experts import GptOssExpertsFunction
from patcher.integrate.transformers.roles.gpt_oss_rotary import GptOssRotaryEmbedding
from patcher.integrate.transformers.roles.gpt_oss_router import GptOssRouters
from patcher.integrate.transformers.roles.linear import Linears
from patcher.integrate.transformers.roles.norm import GemmaRmsNorms, RmsNorms
from patcher.integrate.transformers.roles.rotation import Rotations
from patcher.integrate.transformers.roles.topk_router import Routers

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
