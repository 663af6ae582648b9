# Op: qk_norm_rope: RMSNorm of each head of query and key, then NeoX rotation, in place: (a, b)
#   becomes (a * cos - b * sin, b * cos + a * sin), a and b the halves of a normalised head;
#   float32, rounded once.
# Arguments: query[T: tokens, q_heads * head_dim], key[T: tokens, kv_heads * head_dim], q_weight[T:
#   head_dim], k_weight[T: head_dim], cos_sin[C: tokens, head_dim], epsilon; T: bfloat16 or float16
#   or float32; C: T or float32
# Writes: query, key
# Needs: a GPU that Triton drives; head_dim even, at most 256; rows at any pitch; graph-safe.
# Idea: one launch for query and key: a program has one head of one token, its two halves in
#   registers, and writes them back where they were. Nothing was tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 03741774ab4abcd454204564cab1be7532c3b359232c6e2d4e9408f24d625904

import torch
import triton
import triton.language as tl


@triton.jit
def qk_norm_rope_kernel(
    query_ptr, key_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, q_pitch, k_pitch, q_heads, epsilon,
    DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDE)
    inside = lane < DIM // 2
    if head < q_heads:
        at = query_ptr + token * q_pitch + head * DIM + lane
        weight_at = q_weight_ptr + lane
    else:
        at = key_ptr + token * k_pitch + (head - q_heads) * DIM + lane
        weight_at = k_weight_ptr + lane
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first) + tl.sum(second * second)) / DIM
    factor = 1 / tl.sqrt(mean + epsilon)
    first = first * factor * tl.load(weight_at, mask=inside, other=0.0).to(tl.float32)
    second = second * factor * tl.load(weight_at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    table = cos_sin_ptr + token * DIM + lane
    cos = tl.load(table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    kind = query_ptr.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(at + DIM // 2, (second * cos + first * sin).to(kind), mask=inside)


def qk_norm_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    epsilon: float,
) -> None:
    dim = len(q_weight)
    q_heads, kv_heads = query.shape[1] // dim, key.shape[1] // dim
    qk_norm_rope_kernel[(len(query), q_heads + kv_heads)](
        query, key, q_weight, k_weight, cos_sin, query.stride(0), key.stride(0), q_heads, epsilon,
        DIM=dim, WIDE=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
