"""The ways in which transformers generates, with patches in: its own tokens, all counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feature_matrix import feature
from transformers_sample import GPT_OSS, LAYERS, PER_LAYER, TOKENS, built, inside, original_kernel

from patcher.integrate import CallCounters
from patcher.integrate.transformers.points import POINTS

STEPS = 6


def generated(model: Any, tokens: torch.Tensor = TOKENS, **how: Any) -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = model.generate(
        tokens, max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, **how
    )
    return found


def calls(book: CallCounters) -> int:
    return sum(book.calls.values())


@feature("static and sliding caches, beams, sampling, prompt lookup", "right", *GPT_OSS)
@pytest.mark.parametrize("name", GPT_OSS)
@pytest.mark.parametrize(
    ("how", "rows"),
    [
        ({"cache_implementation": "static"}, 2),
        ({"cache_implementation": "sliding_window"}, 2),
        ({"num_beams": 3}, 2),
        ({"do_sample": True}, 2),
        ({"prompt_lookup_num_tokens": 2}, 1),
        ({"use_cache": False}, 2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tokens_are_the_models_own(name: str, how: dict[str, Any], rows: int) -> None:
    model = built()
    expected = generated(model, TOKENS[:rows], **how)
    steps: list[int] = []
    counted = model.model.embed_tokens.register_forward_hook(lambda *_: steps.append(1))
    with inside(POINTS[name](model), original_kernel(name)) as book, counted:
        found = generated(model, TOKENS[:rows], **how)
    assert found.equal(expected)
    assert calls(book) == len(steps) * LAYERS * PER_LAYER[name]
    assert not book.reasons
