"""The patch points of vLLM by name; importing them does not import vLLM.

`python -m patcher.integrate.vllm.points` compares a vLLM with the versions read: see `review`.
"""

from __future__ import annotations

from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.roles.activation import GeluAndMul, GeluTanhAndMul, SiluAndMul
from patcher.integrate.vllm.roles.add_norm import AddRmsNorm
from patcher.integrate.vllm.roles.add_norm_route import AddNormRoute
from patcher.integrate.vllm.roles.decode_attention import DecodeAttention
from patcher.integrate.vllm.roles.decode_attention_fp8 import DecodeAttentionFp8
from patcher.integrate.vllm.roles.embed_norm import EmbedNorm
from patcher.integrate.vllm.roles.experts import Down, GateUp
from patcher.integrate.vllm.roles.experts_sum import Reduce
from patcher.integrate.vllm.roles.experts_to_norm import ExpertsToNorm
from patcher.integrate.vllm.roles.fp8_experts import Fp8Experts
from patcher.integrate.vllm.roles.gated_delta import GatedDelta
from patcher.integrate.vllm.roles.greedy import GreedySampler
from patcher.integrate.vllm.roles.greedy_head import GreedyHead
from patcher.integrate.vllm.roles.grouped_topk import GroupedTopKRouter
from patcher.integrate.vllm.roles.linear import Linear, LmHead
from patcher.integrate.vllm.roles.linear_fp8 import LinearFp8
from patcher.integrate.vllm.roles.mamba2_decode import Mamba2Decode
from patcher.integrate.vllm.roles.mla_decode import MlaDecode
from patcher.integrate.vllm.roles.moe_block import MoeBlock
from patcher.integrate.vllm.roles.norm import GemmaRmsNorm, RmsNorm
from patcher.integrate.vllm.roles.plain_experts import PlainExperts
from patcher.integrate.vllm.roles.qk_norm_rope import QkNormRope
from patcher.integrate.vllm.roles.qkv_rope_kv import QkvRopeKv
from patcher.integrate.vllm.roles.quantize_fp8 import QuantizeFp8
from patcher.integrate.vllm.roles.rms_norm_quant_fp8 import RmsNormQuantFp8
from patcher.integrate.vllm.roles.rope_kv import RopeKvUpdate
from patcher.integrate.vllm.roles.router import Routing
from patcher.integrate.vllm.roles.top_k_top_p import TopKTopPSampler
from patcher.integrate.vllm.roles.topk import TopKRouter

POINTS: dict[str, type[VllmPoint]] = {
    point.name: point
    for point in (
        AddRmsNorm,
        RopeKvUpdate,
        QkvRopeKv,
        DecodeAttention,
        DecodeAttentionFp8,
        MlaDecode,
        Routing,
        Reduce,
        GateUp,
        Down,
        Linear,
        LmHead,
        LinearFp8,
        Fp8Experts,
        PlainExperts,
        ExpertsToNorm,
        RmsNorm,
        GemmaRmsNorm,
        SiluAndMul,
        GeluAndMul,
        GeluTanhAndMul,
        TopKRouter,
        GroupedTopKRouter,
        GatedDelta,
        Mamba2Decode,
        GreedySampler,
        TopKTopPSampler,
        AddNormRoute,
        QkNormRope,
        QuantizeFp8,
        RmsNormQuantFp8,
        EmbedNorm,
        GreedyHead,
        MoeBlock,
    )
}


if __name__ == "__main__":
    from patcher.integrate.vllm.review import main

    raise SystemExit(main(POINTS))
