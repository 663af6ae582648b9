"""Seeded inputs of mla_decode, one regime at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

REGIMES = ("normal", "short", "ends", "shared", "peaked", "rotated")
"""`normal` is timed: requests of nearly all the context, each in blocks of its own as far as there
are enough."""


def make(point: Any, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    tokens, pages, blocks, size, latent = (
        axes[name] for name in ("tokens", "pages", "blocks", "block_size", "latent")
    )
    wide, most = latent + axes["rope"], pages * size

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    query = torch.randn(tokens, axes["heads"], wide, generator=generator, device=device)
    cache = torch.randn(blocks, size, wide, generator=generator, device=device)
    query = query * (8 / math.sqrt(wide))  # scores of about one, whatever the width
    lengths = most - whole(0, min(size, most) - 1, tokens)
    order = torch.randperm(blocks, generator=generator, device=device)
    table = order.repeat(-(-tokens * pages // blocks))[: tokens * pages].view(tokens, pages)
    match regime:
        case "normal":
            pass
        case "short":  # any length, and padding, as in a graph for more requests
            lengths = whole(0, most, tokens)
            lengths[-1] = 0
        case "ends":  # one token, and whole blocks
            lengths = torch.where(whole(0, 1, tokens) == 0, 1, most)
        case "shared":  # one prefix, with its blocks in several requests and twice in one
            table = whole(0, blocks - 1, 1, pages).expand(tokens, pages)
        case "peaked":  # a few scores take all the weight, at positions far apart
            query = 8 * query
        case "rotated":  # the keys' last part decides
            query[..., :latent] *= 0.1
            query[..., latent:] *= 6
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    # what follows a request's last block is left over from another request, or was never written
    beyond = torch.arange(pages, device=device) >= (-(-lengths // size)).unsqueeze(1)
    dtype, index = (getattr(torch, point.dtypes[symbol]) for symbol in "TI")
    return {
        "query": query.to(dtype),
        "cache": cache.to(dtype),
        "block_table": table.masked_fill(beyond, -1).to(index).contiguous(),
        "lengths": lengths.to(index),
        "out": torch.zeros(tokens, axes["heads"], latent, dtype=dtype, device=device),
    }
