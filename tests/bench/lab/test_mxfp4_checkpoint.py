"""A checkpoint in MXFP4, which transformers reads as it reads the published ones."""

from __future__ import annotations

from pathlib import Path

import torch

from patcher.bench.engines.architecture import full_config
from patcher.bench.lab.mxfp4_checkpoint import write_checkpoint


def test_transformers_reads_it_and_routing_is_spread_out(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = full_config("gpt-oss-tiny") | {"quantization_config": {"quant_method": "mxfp4"}}
    write_checkpoint(tmp_path, config)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    layer = model.model.layers[0]
    spread = layer.mlp.experts.gate_up_proj.float().std().item()
    assert 0.01 < spread < 0.04  # a scale is a power of two
    tokens = torch.randint(config["vocab_size"], (1, 64))
    routed: list[torch.Tensor] = []
    layer.mlp.router.register_forward_hook(lambda *given: routed.append(given[2][-1]))
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.isfinite().all()
    assert len(routed[0].unique()) > config["num_local_experts"] // 2


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    config = full_config("gpt-oss-tiny")
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, config)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
