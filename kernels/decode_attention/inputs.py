"""Seeded inputs of decode_attention, one regime at a time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

REGIMES = ("normal", "short", "ends", "shared", "peaked")
"""`normal` is timed: requests of nearly all the context, each in blocks of its own as far as there
are enough."""
WINDOW = 128


class Point(Protocol):
    @property
    def axes(self) -> dict[str, int]: ...
    @property
    def dtypes(self) -> dict[str, str]: ...


def make(point: Point, generator: torch.Generator, regime: str) -> dict[str, Tensor]:
    """All tensors of the contract on the generator's device in the point's dtypes.

    Raises:
        ValueError: unknown regime.
    """
    axes, device = point.axes, generator.device
    dtype = getattr(torch, point.dtypes["T"])
    tokens, pages, blocks = axes["tokens"], axes["pages"], axes["blocks"]
    heads = axes["group"] * axes["kv_heads"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        """Numbers from `low` to `high`."""
        return torch.randint(low, high + 1, shape, generator=generator, device=device)

    cache = blocks, axes["block_size"], axes["kv_heads"], axes["head_dim"]
    query = normal(tokens, heads * axes["head_dim"])
    key_cache, value_cache = normal(*cache), normal(*cache)
    most = pages * axes["block_size"]
    lengths = most - whole(0, min(axes["block_size"], most) - 1, tokens)
    order = torch.randperm(blocks, generator=generator, device=device)
    table = order.repeat(-(-tokens * pages // blocks))[: tokens * pages].view(tokens, pages)
    window = whole(1, most, axes["windowed"])
    match regime:
        case "normal":
            window = torch.full_like(window, WINDOW)
        case "short":  # any length, and padding, as in a graph for more requests
            lengths = whole(0, most, tokens)
            lengths[-1] = 0
        case "ends":  # one token, and whole blocks
            lengths = torch.where(whole(0, 1, tokens) == 0, 1, most)
        case "shared":  # one prefix, with its blocks in several requests and twice in one
            table = whole(0, blocks - 1, 1, pages).expand(tokens, pages)
        case "peaked":  # a few scores take all the weight, at positions far apart
            query, key_cache = 4 * query, 4 * key_cache
        case _:
            raise ValueError(f"unknown regime {regime!r}")
    # what follows a request's last block is left over from another request, or was never written
    used = -(-lengths // axes["block_size"])
    beyond = torch.arange(pages, device=device) >= used.unsqueeze(1)
    index = getattr(torch, point.dtypes["I"])
    return {
        "query": query.to(dtype),
        "key_cache": key_cache.to(dtype),
        "value_cache": value_cache.to(dtype),
        "block_table": table.masked_fill(beyond, -1).to(index).contiguous(),
        "lengths": lengths.to(index),
        "window": window.to(index),
        "sinks": normal(axes["sinked"] * heads).to(dtype),
        "out": torch.zeros(tokens, heads * axes["head_dim"], dtype=dtype, device=device),
    }
