# Op: qk_norm_rope: RMSNorm of each head of query and key, then NeoX rotation, in place: (a, b)
#   becomes (a * cos - b * sin, b * cos + a * sin), a and b the halves of a normalised head;
#   float32, rounded once.
# Arguments: query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads * head_dim], q_weight[T:
#   head_dim], k_weight[T: head_dim], cos_sin[C: tokens, head_dim], epsilon; T: bfloat16 or float16
#   or float32; C: T or float32
# Writes: query, key
# Needs: PyTorch alone; shipped for the CPU; any size, rows at any pitch.
# Idea: none beyond PyTorch's: each head is normalised and rotated in float32 and written back in
#   place. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: a9fb23352a2d8c566317be245f24a42618e434f6cab99572ff81ea2f8a61f864

import torch


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    epsilon: float,
) -> None:
    cos, sin = cos_sin.float().unsqueeze(1).chunk(2, -1)
    for rows, weight in ((query, q_weight), (key, k_weight)):
        heads = rows.float().unflatten(1, (-1, weight.shape[0]))
        scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + epsilon)
        first, second = (heads * scale * weight.float()).chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        rows.copy_(turned.flatten(1))
