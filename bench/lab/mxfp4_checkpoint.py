"""A checkpoint on disk as gpt-oss is published: safetensors with experts in MXFP4, seeded random.

What serves random weights otherwise fills an engine's own tensors, which an engine that reloads
its weights from disk cannot do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from patcher.bench.engines.random_weights import spread_of
from patcher.bench.engines.served_weights import FLOAT4_SPREAD

BLOCK = 32
"""Values that share a scale."""
_EXPERTS = ("gate_up_proj", "down_proj")
_ONE = 127
"""The exponent's byte of a scale of 1."""


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Write config.json and model.safetensors.

    Args:
        config: of a model of transformers whose experts are `gate_up_proj` and `down_proj`, of
            shape [experts, inner, outer], and are quantised alone.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    with torch.device("meta"):
        model = causal.from_config(AutoConfig.for_model(**plain))
    generator = torch.Generator().manual_seed(seed)
    spreads = spread_of(name for name, _ in model.named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(_EXPERTS):
            experts, inner, outer = parameter.shape
            blocks = experts, outer, inner // BLOCK
            codes = (*blocks, BLOCK // 2)  # two to a byte
            tensors[f"{name}_blocks"] = torch.randint(
                256, codes, generator=generator, dtype=torch.uint8
            )
            power = round(math.log2(spreads[name] / FLOAT4_SPREAD))
            tensors[f"{name}_scales"] = torch.full(blocks, _ONE + power, dtype=torch.uint8)
        elif "norm" in name:
            tensors[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
        else:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.bfloat16)
            tensors[name] = values.mul_(spreads[name])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**config, "torch_dtype": "bfloat16"})
    (folder / "config.json").write_text(text, encoding="utf-8")
