"""rope(query[T: tokens, q_heads, head_dim], key[T: tokens, kv_heads, head_dim],
cos_sin[C: tokens, head_dim])."""

import torch


def rope(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)
    for heads in (query, key):
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
