"""Seeded inputs of sample_top_k_top_p, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "top-k", "top-p", "edge", "ties", "free", "greedy", "masked")
"""`normal` is timed: some rows have k, some p, some both."""
MOST = 40
"""The most tokens that p keeps: the smallest of them has a mass of about 1e-4."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract; the r-th logit is near 24 - 2 log(1 + r), in any order.

    Raises:
        ValueError: unknown regime.
    """
    tokens, vocab = point.axes["tokens"], point.axes["vocab"]
    device = generator.device

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    ranks = drawn(tokens, vocab).argsort(1)
    logits = 24.0 - 2.0 * torch.log1p(ranks.float())
    noise = -torch.log1p(-drawn(tokens, vocab) * (1 - 1e-6)).clamp_max(-1e-6)
    most = min(MOST, vocab)
    k = (1 + drawn(tokens) * most).int().clamp_max(most)
    kept = (1 + drawn(tokens) * k).int().minimum(k)
    kind = (torch.arange(tokens, device=device) + int(drawn(1) * 3)) % 3
    match regime:
        case "normal":
            k = k.masked_fill(kind == 1, vocab)
            kept = kept.masked_fill(kind == 2, vocab)
        case "top-k":
            kept = torch.full_like(kept, vocab)
        case "top-p":
            k = torch.full_like(k, vocab)
        case "edge":
            pass
        case "ties":  # as models in bfloat16 give; the first three are apart
            logits = logits.round()
            k = (4 + drawn(tokens) * MOST).int().clamp_max(most)
            kept = k.masked_fill(kind < 2, vocab)
            k = k.masked_fill(kind == 2, vocab)
        case "free":
            k, kept = torch.full_like(k, vocab), torch.full_like(kept, vocab)
        case "greedy":
            k, kept = torch.ones_like(k), torch.full_like(kept, vocab)
        case "masked":  # a grammar allows a few tokens, fewer than k
            logits = logits.masked_fill((ranks > 3) & (ranks % 97 > 0), -math.inf)
            k, kept = torch.full_like(k, vocab), kept.clamp_max(3)
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    # p in the middle of the mass of the last token that it keeps
    found, order = logits.double().sort(dim=1, descending=True)
    least = found.gather(1, k.long().unsqueeze(1) - 1)
    mass = found.masked_fill(found < least, -math.inf).softmax(1)
    last = kept.long().unsqueeze(1).clamp_max(vocab) - 1
    p = (mass.cumsum(1) - mass / 2).gather(1, last).squeeze(1)
    p = p.masked_fill(kept == vocab, 1.0).float()
    last = torch.minimum(last, k.long().unsqueeze(1) - 1)
    if regime in ("edge", "top-k", "top-p"):  # the last that stays is chosen, or the next were
        noise = 1 + noise
        for place, factor in (((last + 1).clamp_max(vocab - 1), 1e-6), (last, 1e-4)):
            noise.scatter_(1, order.gather(1, place), factor * (1 + drawn(tokens, 1)))
    if regime == "ties":  # whichever of those at the edge stay, none of them is chosen
        edge = found.gather(1, last)
        shared = (found == edge) & ((found > edge).any(1, keepdim=True))
        sorted_noise = noise.gather(1, order).masked_fill(found < edge, 1e-6)
        noise.scatter_(1, order, sorted_noise.masked_fill(shared, 1e3))
    stays = torch.arange(vocab, device=device) <= last
    best = (mass / noise.gather(1, order)).masked_fill(~stays, -1).argmax(1, keepdim=True)
    at = order.gather(1, best)
    noise.scatter_(1, at, noise.gather(1, at) * 0.9)
    return {
        "logits": logits,
        "k": k,
        "p": p,
        "noise": noise,
        "output": torch.randint(0, vocab, (tokens,), generator=generator, device=device),
    }
