"""A model of transformers spread over GPUs, patched and not: `python -m
patcher.bench.lab.transformers_devices OUT.json BUNDLE`, on a host with two GPUs or more.

No dispatcher of accelerate sets the current device, so a kernel must run on the device of its
tensors, or be refused. OUT has a row for each way to spread it: the largest difference of a logit,
the share of greedy tokens that agree, calls and fallbacks, and whether all is as before after it.
It ends with 1 if a patched model computes something else, one is not as before, or the patch
does not run on one GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import patcher
from patcher.bench import PatcherError

LAYERS, HIDDEN = 4, 2880
TOKENS, BATCH, STEPS = 33, 4, 8
ALLOWED = 0.05
"""Largest difference of a logit, as a share of the largest logit: bfloat16 rounds in each layer."""


def spread() -> dict[str, Any]:
    """Ways to place the layers, as `device_map`."""
    by_hand: dict[str, int] = {"model.embed_tokens": 0, "model.rotary_emb": 0}
    by_hand |= {f"model.layers.{layer}": 2 * layer // LAYERS for layer in range(LAYERS)}
    by_hand |= {"model.norm": 1, "lm_head": 1}
    return {"one GPU": {"": 0}, "by hand": by_hand, "balanced": "balanced"}


def seen(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, float32 [batch, tokens, vocabulary], and greedy tokens, on the CPU."""
    here = tokens.to(model.get_input_embeddings().weight.device)
    with torch.no_grad():
        logits = model(here).logits.float().cpu()
        new = model.generate(here, max_new_tokens=STEPS, do_sample=False).cpu()
    return logits, new


def row(model: Any, tokens: torch.Tensor, bundle: Path) -> dict[str, Any]:
    """What a patch does in one model."""
    logits, new = seen(model, tokens)
    found: dict[str, Any] = {"devices": sorted({str(one.device) for one in model.parameters()})}
    try:
        with patcher.patched(model, bundle) as receipt:
            with_it, new_with_it = seen(model, tokens)
            found |= {"calls": receipt.total_calls, "fallbacks": receipt.fallbacks}
        found["largest_difference"] = float((with_it - logits).abs().max())
        found["largest_logit"] = float(logits.abs().max())
        found["tokens_agree"] = float((new == new_with_it).float().mean())
    except PatcherError as error:
        found["refused"] = error.message
    after = seen(model, tokens)
    found["as_before"] = torch.equal(logits, after[0]) and torch.equal(new, after[1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    parser = argparse.ArgumentParser(prog="patcher.bench.lab.transformers_devices")
    parser.add_argument("out", type=Path)
    parser.add_argument("bundle", type=Path)
    given = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        parser.error(f"this host shows {torch.cuda.device_count()} GPUs; it takes two")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_local_experts=4,
        num_experts_per_tok=4,  # all, since rounding changes which are chosen
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=512,
    )
    tokens = torch.randint(0, config.vocab_size, (BATCH, TOKENS))
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for name, places in spread().items():
            model = auto.from_pretrained(folder, dtype=torch.bfloat16, device_map=places)
            rows[name] = row(model.eval(), tokens, given.bundle)
            print(name, json.dumps(rows[name]), flush=True)
            del model
    given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if passed(rows) else 1


def passed(rows: dict[str, dict[str, Any]]) -> bool:
    """Whether all are right, and the patch runs where there is one GPU alone."""
    return bool(rows["one GPU"].get("calls")) and all(map(right, rows.values()))


def right(found: dict[str, Any]) -> bool:
    """Whether a row is of a refusal or the same model, and of one that was restored."""
    same = "refused" in found or found["largest_difference"] <= ALLOWED * found["largest_logit"]
    return bool(found["as_before"]) and same


if __name__ == "__main__":
    raise SystemExit(main())
