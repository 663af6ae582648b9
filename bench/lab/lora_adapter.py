"""A LoRA adapter with random weights, as peft writes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RANK = 8
SCALE = 1 / 16
"""Of the weights: the product is about as large as random weights of a model."""


def write_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    """Write an adapter for the attention's projections of all layers of a model.

    Args:
        folder: where; several processes may write the same at a time.
        config: the model's config.json.
    """
    from safetensors.torch import save_file

    hidden, wide = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    sizes = {"q_proj": (hidden, wide), "o_proj": (wide, hidden)}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inner, outer) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora"
            for half, shape in (("A", (RANK, inner)), ("B", (outer, RANK))):
                values = torch.randn(shape, generator=generator) * SCALE
                weights[f"{name}_{half}.weight"] = values.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{os.getpid()}.safetensors"
    save_file(weights, written)
    written.replace(folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def give_adapters(engine: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Give every second request of a `VllmEngine` an adapter, which is written to the folder."""
    from vllm.lora.request import LoRARequest

    write_adapter(folder, config)
    original, adapter = engine._engine.add_request, LoRARequest("random", 1, str(folder))

    def add(name: str, *args: Any, **more: Any) -> Any:
        odd = int(name.rpartition("-")[2]) % 2
        return original(name, *args, **more, lora_request=adapter if odd else None)

    engine._engine.add_request = add
