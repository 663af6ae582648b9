"""Random weights that amplify no rounding, under the names of two engines."""

from __future__ import annotations

import math

import pytest
import torch

from patcher.bench import Workload
from patcher.bench.ab.logits import logit_error, served_logits
from patcher.bench.engines import causal_model, open_engine
from patcher.bench.engines.random_weights import STD, spread_of

WORKLOAD = Workload(
    model="gpt-oss-tiny",
    device="cpu",
    dtype="bfloat16",
    batch=4,
    input_len=24,
    output_len=16,
    threads=1,
)


def test_both_engines_names_are_known() -> None:
    of_transformers = {
        "model.embed_tokens.weight": 1.0,
        "model.layers.0.self_attn.o_proj.weight": STD / 2,
        "model.layers.1.mlp.experts.down_proj_bias": STD / 2,
        "model.layers.1.mlp.experts.gate_up_proj": STD,
        "lm_head.weight": STD,
    }
    of_vllm = {
        "model.embedding.weight": 1.0,
        "model.layers.0.attn.o_proj.bias": STD / 2,
        "model.layers.0.mlp.experts.w2_weight_scale": STD / 2,
        "model.layers.1.mlp.experts.w13_weight": STD,
        "model.layers.1.mlp.router.weight": STD,
    }
    for names in (of_transformers, of_vllm):
        found = spread_of(names)
        assert {name: round(value, 9) for name, value in found.items()} == names
    [alone] = spread_of(["o_proj.weight"]).values()
    assert alone == STD / math.sqrt(2)


def rounding() -> tuple[float, int, int, int]:
    """What bfloat16 makes of the logits, in their standard deviations; changed greedy picks, tokens
    that are picked, and positions.
    """
    engine = open_engine(WORKLOAD)
    prompts = engine.prompts(0)
    picked = engine.generate(prompts, WORKLOAD.output_len).tokens
    served = served_logits(engine, prompts, picked).flatten(0, 1)
    wide, _ = engine.reference_logits(torch.cat([prompts, picked], dim=1), picked.shape[1] + 1)
    reference = wide[:, :-1].flatten(0, 1)
    found = logit_error(served, reference)
    tokens = reference.argmax(-1).unique().numel()
    return found.rmse / reference.std().item(), found.flips, tokens, len(reference)


def test_a_model_of_them_is_not_at_the_mercy_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    error, flips, tokens, positions = rounding()
    assert error < 0.02
    assert flips <= 0.1 * positions
    assert tokens > 0.7 * positions
    # as where every matrix is normal(0, 0.02)
    monkeypatch.setattr(causal_model, "spread_of", lambda names: dict.fromkeys(names, STD))
    other_error, _, other_tokens, _ = rounding()
    assert other_error > 2 * error  # by which instructions a processor rounds: 2.9 and more
    assert other_tokens < 0.3 * positions
