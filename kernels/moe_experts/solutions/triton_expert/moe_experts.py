# Op: moe_experts: output[t] = sum over j of gains[t, j] * Down[e] (silu(g) * u), with e = ids[t,
#   j], and g and u the halves of GateUp[e] x[t]; float32 sums.
# Arguments: x[T: tokens, hidden], gate_up[T: experts, 2 * inner, hidden], down[T: experts, hidden,
#   inner], gains[S: tokens, top_k], ids[I: tokens, top_k], output[T: tokens, hidden]; T: bfloat16
#   or float16 or float32; S: float32 or T; I: int64 or int32
# Writes: output
# Needs: a GPU that Triton drives; tokens at most 64; contiguous tensors; graph-safe; calls of one
#   shape on one stream at a time.
# Idea: nothing is sorted: a program has one expert, 32 columns and all tokens, of which others' are
#   masked, so a weight is read once. With fewer gates than experts, programs are of gates, and an
#   expert's first gate works. Of an id that a token has twice the last place has the row, with the
#   sum of the gains. Three launches: gate and up, down, the sum over a token's experts in a fixed
#   order.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 202bbb1b5cec7afc8de0fe424c3aa6fe29b00aabaa88e472e18aa14a62405b92

import torch
import triton
import triton.language as tl

_WORKSPACES: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}


@triton.jit
def moe_experts_kernel(
    x_ptr, w_ptr, gains_ptr, ids_ptr, to_ptr, tokens, experts, inner, outer,
    UP: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BY_GATE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A row for each gate: with UP silu(g) * u * gain from the token's row, else Down of it."""
    token, choice = tl.arange(0, ROWS), tl.arange(0, WIDE)
    gates = token[:, None] * TOP_K + choice[None, :]
    real = (token[:, None] < tokens) & (choice[None, :] < TOP_K)
    ids = tl.load(ids_ptr + gates, mask=real, other=-1).to(tl.int32)
    expert = tl.program_id(0)
    if BY_GATE:
        expert = tl.load(ids_ptr + expert).to(tl.int32)
    chosen = ids == expert
    gate = tl.max(tl.where(chosen, gates, -1), 1)  # of an id that a token has twice the last
    mine = gate >= 0
    works = (tl.max(gate, 0) >= 0) & (expert >= 0) & (expert < experts)
    if BY_GATE:  # of the gates with one expert, the first has the work
        first = tl.min(tl.min(tl.where(chosen, gates, tokens * TOP_K), 1), 0)
        works = works & (first == tl.program_id(0))
    if works:
        kind = tl.bfloat16 if x_ptr.dtype.element_ty == tl.bfloat16 else tl.float32
        parts: tl.constexpr = 2 if UP else 1
        k = tl.arange(0, K)
        n = tl.program_id(1) * N + tl.arange(0, N)
        row = token if UP else gate
        x_at = x_ptr + row[:, None] * inner + k[None, :]
        w_at = w_ptr + (expert.to(tl.int64) * parts * outer + n[None, :]) * inner + k[:, None]
        value = tl.zeros((ROWS, N), tl.float32)
        up = tl.zeros((ROWS, N), tl.float32)
        for start in range(0, inner, K):
            there = k < inner - start
            x = tl.load(x_at + start, mask=mine[:, None] & there[None, :], other=0.0).to(kind)
            w_mask = (n < outer)[None, :] & there[:, None]
            w = tl.load(w_at + start, mask=w_mask, other=0.0).to(kind)
            value += tl.dot(x, w, input_precision="ieee")
            if UP:
                w = tl.load(w_at + outer.to(tl.int64) * inner + start, mask=w_mask, other=0.0)
                up += tl.dot(x, w.to(kind), input_precision="ieee")
        if UP:
            gains = tl.load(gains_ptr + gates, mask=real & chosen, other=0.0).to(tl.float32)
            value = value / (1 + tl.exp(-value)) * up * tl.sum(gains, 1)[:, None]
        at = to_ptr + gate[:, None] * outer + n[None, :]
        mask = mine[:, None] & (n < outer)[None, :]
        tl.store(at, value.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_experts_sum_kernel(
    parts_ptr, ids_ptr, output_ptr, hidden, experts,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choices = tl.arange(0, WIDE)
    ids = tl.load(ids_ptr + token * TOP_K + choices, mask=choices < TOP_K, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(0, TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice)
        again = tl.max(tl.where((ids == expert) & (choices > choice), 1, 0), 0)
        # without an expert, or where a later choice has it, nothing was written
        if (expert >= 0) & (expert < experts) & (again == 0):
            at = parts_ptr + (token * TOP_K + choice) * hidden + column
            total += tl.load(at, mask=column < hidden, other=0.0)
    total = total.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + token * hidden + column, total, mask=column < hidden)


def moe_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gains: torch.Tensor,
    ids: torch.Tensor,
    output: torch.Tensor,
) -> None:
    (tokens, top_k), (experts, hidden, inner) = ids.shape, down.shape
    gates = tokens * top_k
    # float16 would overflow where gate and up are large
    kind = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    key = (x.device, kind, gates, hidden, inner)
    if x.is_cuda:
        key += (torch.cuda.current_stream(x.device).cuda_stream,)
    if key not in _WORKSPACES:
        parts = x.new_empty((gates, hidden), dtype=torch.float32)
        _WORKSPACES[key] = x.new_empty((gates, inner), dtype=kind), parts
    middle, parts = _WORKSPACES[key]
    programs, wide = min(experts, gates), triton.next_power_of_2(top_k)
    sizes = {
        "K": 64 if kind is torch.bfloat16 else 32, "N": 32, "BY_GATE": gates < experts,
        "TOP_K": top_k, "ROWS": max(triton.next_power_of_2(tokens), 16), "WIDE": wide,
        "num_warps": 4, "num_stages": 3 if kind is torch.bfloat16 else 2,
    }  # fmt: skip
    moe_experts_kernel[(programs, triton.cdiv(inner, 32))](
        x, gate_up, gains, ids, middle, tokens, experts, hidden, inner, UP=True, **sizes
    )
    moe_experts_kernel[(programs, triton.cdiv(hidden, 32))](
        middle, down, gains, ids, parts, tokens, experts, inner, hidden, UP=False, **sizes
    )
    moe_experts_sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, output, hidden, experts, TOP_K=top_k, WIDE=wide, BLOCK=1024, num_warps=4
    )
