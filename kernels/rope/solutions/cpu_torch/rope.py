# Op: rope: NeoX rotation of query and key in place: (a, b) becomes (a * cos - b * sin, b * cos + a
#   * sin), a and b the halves of a head; float32, rounded once.
# Arguments: query[T: tokens, q_heads, head_dim], key[T: tokens, kv_heads, head_dim], cos_sin[C:
#   tokens, head_dim]; T: bfloat16 or float16 or float32; C: T or float32
# Writes: query, key
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: each half of a head is read once in float32 and written back in
#   place. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 7ad215e72d2bbe6d17042502803f8ef0152baeb696144870a5cb2a137fa7c7eb

import torch


def rope(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)
    for heads in (query, key):
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
