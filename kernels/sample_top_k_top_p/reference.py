"""sample_top_k_top_p in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(
    logits: Tensor, k: Tensor, p: Tensor, noise: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """The chosen tokens, [tokens], as float64; logits and noise are [tokens, vocab], k and p
    [tokens].
    """
    found, order = logits.double().sort(dim=1, descending=True)
    least = found.gather(1, k.long().unsqueeze(1) - 1)
    probabilities = found.masked_fill(found < least, -math.inf).softmax(1)
    above = probabilities.cumsum(1) - probabilities
    # with p = 1, a sum that is 1 before the last token would drop it
    stays = (above < p.double().unsqueeze(1)) | (p >= 1).unsqueeze(1)
    scores = (probabilities / noise.double().gather(1, order)).masked_fill(~stays, -1.0)
    return {"output": order.gather(1, scores.argmax(1, keepdim=True)).squeeze(1).double()}


def control(
    logits: Tensor, k: Tensor, p: Tensor, noise: Tensor, output: Tensor
) -> dict[str, Tensor]:
    """`reference` of logits in the range of float4, which ends at 6, so that many are equal."""
    found = reference(logits.clamp(-6.0, 6.0), k, torch.ones_like(p), noise, output)
    return {"output": found["output"].to(output.dtype)}
