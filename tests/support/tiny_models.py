"""Architectures of every kind in miniature: a folder with the config.json of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2}
LINEAR = {
    f"linear_{name}": size
    for name, size in (
        ("num_key_heads", 2),
        ("num_value_heads", 4),
        ("key_head_dim", 16),
        ("value_head_dim", 16),
    )
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 64},
    "mixtral": EXPERTS,
    "deepseek_v2": {**ROUTED, **LATENT, "v_head_dim": 16, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 64,
    },
    "qwen3_next": {
        **EXPERTS,
        **LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
}
MORE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("mistral", "qwen2", "qwen3", "phi3", "olmo2")},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "gpt_oss": EXPERTS,
    "gemma2": {"sliding_window": 64},
    "glm4_moe": ROUTED,
    "mamba": {"state_size": 8},
    "kimi_linear": {
        **ROUTED,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v3": {
        **ROUTED,
        **LATENT,
        "topk_group": 1,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "glm4_moe_lite": {
        **ROUTED,
        **LATENT,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v4": {
        **ROUTED,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
    },
    "rwkv": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}
WHOLE = {
    **dict.fromkeys(("llama", "qwen3", "qwen3_moe", "mixtral", "glm4_moe"), "rms_norm"),
    "llama4_text": "rms_norm",
    **dict.fromkeys(("deepseek_v2", "deepseek_v4", "olmo2", "phi3", "lfm2"), "rms_norm"),
    **dict.fromkeys(("mamba2", "granitemoehybrid", "falcon_h1", "kimi_linear"), "rms_norm"),
    **dict.fromkeys(("gpt_oss", "llama", "granitemoehybrid"), "fused_add_rms_norm"),
    "qwen2": "silu_and_mul",
    **dict.fromkeys(("gemma3_text", "gemma3", "qwen3_next"), "gemma_rms_norm"),
}
"""Architectures that go the whole way in `test_any_model_whole.py`, and with which op."""


def model_of(folder: Path, kind: str, **more: Any) -> str:
    """A folder with the config.json of a small model, and nothing else."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    return str(folder)


def multimodal(folder: Path) -> str:
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=SIZES, vision_config=seen)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    return str(folder)
