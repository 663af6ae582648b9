"""Small models of any architecture with a role of `integrate/transformers` in them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_models import EXPERTS, KINDS, MORE, SIZES
from transformers_sample import inside, original_kernel

from patcher.integrate import CallCounters

TOKENS = torch.arange(1, 17).view(2, 8)


def built(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A small model in evaluation; experts are named in each of the ways that settings do."""
    torch.manual_seed(0)
    own = {**KINDS, **MORE}.get(kind, {**EXPERTS, "num_experts": 4})
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **own, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)


@torch.inference_mode()
def run_in(model: Any, point: Any, kernel: Any = None) -> tuple[CallCounters, float]:
    """Logits with a point in the model, and again without it, which must be the same bits.

    Returns:
        The counters, and the largest difference in between, of the largest logit.
    """
    before = model(TOKENS).logits
    with inside(point, kernel or original_kernel(point.name)) as book:
        during = model(TOKENS).logits
    assert model(TOKENS).logits.equal(before), "without the patch the same bits"
    assert not any("patch_point" in vars(type(each)) for each in model.modules())
    return book, float((during - before).abs().max() / before.abs().max())
