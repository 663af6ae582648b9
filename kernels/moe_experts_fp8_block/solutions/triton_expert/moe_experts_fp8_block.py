# Op: moe_experts_fp8_block: output[t] = sum over j of gains[t, j] * W2[e] (silu(g) * u), with e =
#   ids[t, j] and g, u the halves of W1[e] x[t]; weights are fp8 times their block's scale; float32
#   sums.
# Arguments: x[T: tokens, depth * block], w1[Q: experts, 2 * wide * block, depth * block],
#   w1_scale[F: experts, 2 * wide, depth], w2[Q: experts, depth * block, wide * block], w2_scale[F:
#   experts, depth, wide], gains[F: tokens, top_k], ids[I: tokens, top_k], output[T: tokens, depth *
#   block]; T: bfloat16 or float16 or float32; Q: float8_e4m3fn; F: float32; I: int32
# Writes: output
# Needs: a GPU of capability 8.9 or above that Triton drives; tokens at most 64; contiguous tensors;
#   graph-safe; calls of one shape on one stream at a time.
# Idea: nothing is sorted: a program has one expert, 32 columns and all tokens, of which others' are
#   masked, so a weight is read once. With fewer gates than experts, programs are of gates, and an
#   expert's first gate works. fp8 becomes bfloat16, or TF32 for other T, which hold it exactly; a
#   block's sums are scaled. Three launches: gate and up, down, the sum over a token's experts in a
#   fixed order.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 41a5da3abb1b7b0ce68b2586e87769819bba863b18103291739c6fdb164cbc01

import torch
import triton
import triton.language as tl

_WORKSPACES: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def moe_experts_fp8_block_kernel(
    x_ptr, w_ptr, scale_ptr, gains_ptr, ids_ptr, to_ptr, tokens, deep, wide,
    UP: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BY_GATE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row for each gate: with UP silu(g) * u * gain from the token's row, else W2 of its own."""
    token, choice = tl.arange(0, ROWS), tl.arange(0, WIDE)
    gates = token[:, None] * TOP_K + choice[None, :]
    real = (token[:, None] < tokens) & (choice[None, :] < TOP_K)
    ids = tl.load(ids_ptr + gates, mask=real, other=-1)
    expert = tl.program_id(0)
    if BY_GATE:
        expert = tl.load(ids_ptr + expert)
    gate = tl.max(tl.where(ids == expert, gates, -1), 1)
    mine = gate >= 0
    works = (tl.max(gate, 0) >= 0) & (expert >= 0)
    if BY_GATE:  # of the gates with one expert, the first has the work
        first = tl.min(tl.where(mine, gate, tokens * TOP_K), 0)
        works = works & (first == tl.program_id(0))
    if works:
        kind = tl.bfloat16 if x_ptr.dtype.element_ty == tl.bfloat16 else tl.float32
        inner, outer = deep * BLOCK, wide * BLOCK
        parts: tl.constexpr = 2 if UP else 1
        k = tl.arange(0, K)
        n = tl.program_id(1) * N + tl.arange(0, N)
        row = token if UP else gate
        matrix = expert.to(tl.int64) * parts
        x_at = x_ptr + row[:, None] * inner + k[None, :]
        x_mask = mine[:, None] & (k < BLOCK)[None, :]
        w_at = w_ptr + (matrix * outer + n[None, :]) * inner + k[:, None]
        w_mask = (n < outer)[None, :] & (k < BLOCK)[:, None]
        scale_at = scale_ptr + (matrix * wide + n // BLOCK) * deep
        value = tl.zeros((ROWS, N), tl.float32)
        up = tl.zeros((ROWS, N), tl.float32)
        for block in range(0, deep):
            x = tl.load(x_at + block * BLOCK, mask=x_mask, other=0.0).to(kind)
            w = tl.load(w_at + block * BLOCK, mask=w_mask, other=0.0).to(kind)
            scale = tl.load(scale_at + block, mask=n < outer, other=0.0)
            value += tl.dot(x, w) * scale[None, :]
            if UP:
                w = tl.load(w_at + outer * inner + block * BLOCK, mask=w_mask, other=0.0)
                scale = tl.load(scale_at + wide * deep + block, mask=n < outer, other=0.0)
                up += tl.dot(x, w.to(kind)) * scale[None, :]
        if UP:
            gain = tl.load(gains_ptr + gate, mask=mine, other=0.0)
            value = value / (1 + tl.exp(-value)) * up * gain[:, None]
        at = to_ptr + gate[:, None] * outer + n[None, :]
        mask = mine[:, None] & (n < outer)[None, :]
        tl.store(at, value.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_experts_fp8_block_sum_kernel(
    parts_ptr, ids_ptr, output_ptr, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(0, TOP_K):
        gate = token * TOP_K + choice
        if tl.load(ids_ptr + gate) >= 0:  # without an expert, nothing was written
            total += tl.load(parts_ptr + gate * hidden + column, mask=column < hidden, other=0.0)
    total = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + token * hidden + column, total, mask=column < hidden)


def moe_experts_fp8_block(
    x: torch.Tensor,
    w1: torch.Tensor,
    w1_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    gains: torch.Tensor,
    ids: torch.Tensor,
    output: torch.Tensor,
) -> None:
    (tokens, top_k), (experts, depth, wide) = ids.shape, w2_scale.shape
    gates, (_, hidden, inner) = tokens * top_k, w2.shape
    # float16 would overflow where gate and up are large
    kind = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    key = (x.device, kind, gates, hidden, inner)
    if x.is_cuda:
        key += (torch.cuda.current_stream(x.device).cuda_stream,)
    if key not in _WORKSPACES:
        parts = x.new_empty((gates, hidden), dtype=torch.float32)
        _WORKSPACES[key] = x.new_empty((gates, inner), dtype=kind), parts
    middle, parts = _WORKSPACES[key]
    block, programs = hidden // depth, min(experts, gates)
    sizes = {
        "BLOCK": block, "K": triton.next_power_of_2(block), "N": 32, "BY_GATE": gates < experts,
        "TOP_K": top_k, "ROWS": max(triton.next_power_of_2(tokens), 16),
        "WIDE": triton.next_power_of_2(top_k), "num_warps": 4,
        "num_stages": 3 if kind is torch.bfloat16 else 2,
    }  # fmt: skip
    moe_experts_fp8_block_kernel[(programs, triton.cdiv(inner, 32))](
        x, w1, w1_scale, gains, ids, middle, tokens, depth, wide, UP=True, **sizes
    )
    moe_experts_fp8_block_kernel[(programs, triton.cdiv(hidden, 32))](
        middle, w2, w2_scale, gains, ids, parts, tokens, wide, depth, UP=False, **sizes
    )
    moe_experts_fp8_block_sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, output, hidden, TOP_K=top_k, BLOCK=1024, num_warps=4
    )
