"""mla_decode in plain PyTorch: the float64 reference and the control that must fail."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(out: Tensor, **given: Tensor | float) -> dict[str, Tensor]:
    """The float64 values of `out`, [tokens, heads, latent]; the others as in `attend`."""
    return {"out": attend(**given, latent=out.shape[2], dtype=torch.float64)}


def control(out: Tensor, **given: Tensor | float) -> dict[str, Tensor]:
    """`reference` with scores, weights and sums rounded to bfloat16."""
    found = attend(**given, latent=out.shape[2], dtype=torch.bfloat16)
    return {"out": found.to(out.dtype)}


def attend(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    latent: int,
    dtype: torch.dtype,
) -> Tensor:
    """[tokens, heads, latent] in a dtype, of query [tokens, heads, latent + rope], cache [blocks,
    block_size, latent + rope], block_table [tokens, pages] and lengths [tokens].
    """
    found = query.new_zeros((*query.shape[:2], latent), dtype=dtype)
    for token, length in enumerate(lengths.tolist()):
        places = torch.arange(length, device=query.device)
        blocks = block_table[token].long()[places // cache.shape[1]]
        rows = cache[blocks, places % cache.shape[1]].to(dtype)
        weights = (query[token].to(dtype) @ rows.T * scale).softmax(-1)
        found[token] = weights @ rows[:, :latent]
    return found
