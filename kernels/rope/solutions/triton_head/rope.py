# Op: rope: NeoX rotation of query and key in place: (a, b) becomes (a * cos - b * sin, b * cos + a
#   * sin), a and b the halves of a head; float32, rounded once.
# Arguments: query[T: tokens, q_heads, head_dim], key[T: tokens, kv_heads, head_dim], cos_sin[C:
#   tokens, head_dim]; T: bfloat16 or float16 or float32; C: T or float32
# Writes: query, key
# Needs: a GPU that Triton drives; head_dim even; contiguous tensors; graph-safe.
# Idea: one launch for query and key: a program has one head of one token.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 0dc69dfec76f0c694a5d92c881f1f231e1300c5576c2a1ecbff52035009002c3

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    query_ptr, key_ptr, cos_sin_ptr, q_heads, kv_heads, DIM: tl.constexpr, WIDE: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, WIDE)
    inside = lane < DIM // 2
    if head < q_heads:
        at = query_ptr + (token * q_heads + head) * DIM + lane
    else:
        at = key_ptr + (token * kv_heads + head - q_heads) * DIM + lane
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    table = cos_sin_ptr + token * DIM + lane
    cos = tl.load(table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(table + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    kind = query_ptr.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(at + DIM // 2, (second * cos + first * sin).to(kind), mask=inside)


def rope(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> None:
    tokens, q_heads, dim = query.shape
    rope_kernel[(tokens, q_heads + key.shape[1])](
        query, key, cos_sin, q_heads, key.shape[1],
        DIM=dim, WIDE=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip
