# Op: moe_block: total = h + the weighted outputs of each token's top_k MXFP4 experts, chosen by the
#   written logits of RMSNorm(h), h = residual + input; output = RMSNorm(total); float32.
# Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden],
#   router_weight[T: experts, hidden], router_bias[T: biased * experts], gate_up_weights[U: experts,
#   inner / 2, hidden * 2], gate_up_scales[U: experts, (inner * 2 + 255) // 256 * 8, hidden],
#   gate_up_bias[B: experts, inner * 2], down_weights[U: experts, hidden / 4, inner * 2],
#   down_scales[U: experts, (hidden + 255) // 256 * 8, inner], down_bias[B: experts, hidden],
#   next_weight[W: hidden], logits[T: tokens, experts], chosen[I: tokens, top_k], total[T: tokens,
#   hidden], output[T: tokens, hidden], alpha, limit, epsilon; T: bfloat16 or float32; W: T or
#   float32; U: uint8; B: float32; I: int32
# Writes: logits, chosen, total, output
# Needs: a GPU that Triton drives; tokens at most 64, experts at most 128; scales of any pitch, the
#   rest contiguous; graph-safe.
# Idea: four launches: a program for each token up to its choice; one for each expert and 128
#   columns of either matmul, all tokens one tile, so that a chosen expert's weights are read once;
#   one for each token to the end. Nothing was tuned.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 8f8f8b74df0c5ec7242797a700c8b7ada8e267272dcfb5f26c3392e1eb0fc058

import torch
import triton
import triton.language as tl


@triton.jit
def moe_block_start_kernel(
    input_ptr, residual_ptr, weight_ptr, router_ptr, bias_ptr, logits_ptr, chosen_ptr, x_ptr,
    gates_ptr, hidden, experts, epsilon,
    BIASED: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One token: norm, router and choice; hidden is a multiple of 64."""
    token = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    real = column < experts
    kind = logits_ptr.dtype.element_ty
    squares = tl.zeros((64,), tl.float32)
    for begin in range(0, hidden, 64):
        at = token * hidden + begin + tl.arange(0, 64)
        h = tl.load(residual_ptr + at).to(tl.float32) + tl.load(input_ptr + at).to(tl.float32)
        squares += h * h
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / hidden + epsilon)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, hidden, 64):
        k = begin + tl.arange(0, 64)
        at = token * hidden + k
        h = tl.load(residual_ptr + at).to(tl.float32) + tl.load(input_ptr + at).to(tl.float32)
        x = h * scale * tl.load(weight_ptr + k).to(tl.float32)
        tl.store(x_ptr + at, x.to(kind))
        router_at = router_ptr + column[:, None] * hidden + k[None, :]
        router = tl.load(router_at, mask=real[:, None], other=0.0).to(tl.float32)
        sums += tl.sum(router * x[None, :], 1)
    if BIASED:
        sums += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    logits = sums.to(kind)
    tl.store(logits_ptr + token * experts + column, logits, mask=real)

    # the choice, by the logits as they were written
    logits = logits.to(tl.float32)
    bits = logits.to(tl.int32, bitcast=True)
    # ascending as whole numbers where the floats ascend; the smaller expert first among equals
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    lowest = -(1 << 62)
    order = tl.where(real, order * COLUMNS + (COLUMNS - 1 - column), lowest)
    mine = tl.zeros((COLUMNS,), tl.int32)
    for _ in tl.static_range(TOP_K):
        hit = order == tl.max(order, 0)
        mine = tl.where(hit & real, 1, mine)
        order = tl.where(hit, lowest, order)
    there = mine == 1
    kept = tl.where(there, logits, float("-inf"))
    part = tl.where(there, tl.exp(logits - tl.max(kept, 0)), 0.0)
    place = token * TOP_K + tl.cumsum(mine, 0) - 1
    tl.store(chosen_ptr + place, column, mask=there)
    tl.store(gates_ptr + place, part / tl.sum(part, 0), mask=there)


@triton.jit
def numbers(words_ptr, scales_ptr, first, columns, depth, pitch, begin, BLOCK: tl.constexpr):
    """FP4 numbers times their scales, float32 [BLOCK, 64]: BLOCK columns of one expert, 64 along k.

    Rows of words hold four of a column's neighbours each; what a word's place says of column and k
    becomes axes, which are put in order.
    """
    row = first // 4 + tl.arange(0, BLOCK // 4)
    place = begin // 2 + tl.arange(0, 32)
    at = row[:, None] * (depth // 2) + place[None, :]
    word = tl.load(words_ptr + at, mask=(row < columns // 4)[:, None], other=0)
    half = tl.join(word, word >> 16)
    last = ((half << 1) & 0x8000) | ((half >> 3) & 0x0180) | ((half >> 7) & 0x0040)
    bits = tl.join(tl.join(half, half << 3), tl.join(half << 6, last))
    # 16 columns, pair, odd column; pair along k, 16s along k; column's 8, odd k, k's 8
    bits = tl.reshape(bits, (BLOCK // 16, 4, 2, 4, 4, 2, 2, 2))
    bits = tl.reshape(tl.permute(bits, (0, 6, 1, 2, 4, 7, 3, 5)), (BLOCK, 64))
    code = (bits >> 6) & 7
    # four times the number: 0, 2, then 4, 6, doubled with each exponent
    size = tl.where(code < 2, code * 2, (2 + (code & 1)) << (code >> 1))
    value = tl.where((bits & 0x8000) != 0, -size, size).to(tl.float32) * 0.25

    n = (first + tl.arange(0, BLOCK))[:, None]
    step = tl.arange(0, 2)[None, :]
    column = begin + n // 128 % 2 * 32 + n % 8 * 4 + step * 2 + n // 8 % 2
    at = (n // 256 * 8 + n // 16 % 8) * pitch + column
    exponent = tl.load(scales_ptr + at, mask=n < columns, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(scale[:, :, None], (BLOCK, 2, 32))
    return value * tl.reshape(scale, (BLOCK, 64))


@triton.jit
def moe_block_expert_kernel(
    rows_ptr, words_ptr, scales_ptr, bias_ptr, chosen_ptr, to_ptr, tokens, columns, alpha, limit,
    expert_words, expert_scales, pitch,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """One expert and BLOCK columns: all tokens are one tile, and those that chose it are written.

    With SWIGLU rows are of tokens and become the activation; without it they are of choices.
    """
    expert = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, ROWS)
    choice = tl.full((ROWS,), -1, tl.int32)  # a token has chosen an expert once, if at all
    for k in tl.static_range(TOP_K):
        number = token * TOP_K + k
        theirs = tl.load(chosen_ptr + number, mask=token < tokens, other=-1)
        choice = tl.where(theirs == expert, number, choice)
    mine = choice >= 0
    if tl.max(choice, 0) >= 0:
        row = token if SWIGLU else choice
        first = tl.program_id(1) * BLOCK
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for begin in range(0, DEPTH, 64):
            at = row[:, None] * DEPTH + begin + tl.arange(0, 64)[None, :]
            x = tl.load(rows_ptr + at, mask=mine[:, None], other=0.0)
            weight = numbers(
                words_ptr + expert * expert_words, scales_ptr + expert * expert_scales,
                first, columns, DEPTH, pitch, begin, BLOCK,
            )  # fmt: skip
            total = tl.dot(x, tl.trans(weight).to(x.dtype), total, input_precision="ieee")
        n = first + tl.arange(0, BLOCK)
        total += tl.load(bias_ptr + expert * columns + n, mask=n < columns, other=0.0)[None, :]
        if SWIGLU:
            gate, up = tl.split(tl.reshape(total, (ROWS, BLOCK // 2, 2)))
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit)
            total = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
            n = first // 2 + tl.arange(0, BLOCK // 2)
            columns = columns // 2
        at = choice[:, None] * columns + n[None, :]
        mask = mine[:, None] & (n < columns)[None, :]
        tl.store(to_ptr + at, total.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_block_end_kernel(
    input_ptr, residual_ptr, rows_ptr, gates_ptr, weight_ptr, total_ptr, output_ptr, hidden,
    epsilon, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its rows by their gates, added to the stream, and the next norm."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    at = token * hidden + column
    total = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(input_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        row = tl.load(rows_ptr + choice * hidden + column, mask=inside, other=0.0)
        total += tl.load(gates_ptr + choice) * row
    tl.store(total_ptr + at, total.to(total_ptr.dtype.element_ty), mask=inside)
    total = tl.where(inside, total, 0.0)  # where a gate is NaN, it is NaN past the end, too
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / hidden + epsilon)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    output = (total * scale * weight).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + at, output, mask=inside)


def moe_block(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    router_weight: torch.Tensor,
    router_bias: torch.Tensor,
    gate_up_weights: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down_weights: torch.Tensor,
    down_scales: torch.Tensor,
    down_bias: torch.Tensor,
    next_weight: torch.Tensor,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    total: torch.Tensor,
    output: torch.Tensor,
    alpha: float,
    limit: float,
    epsilon: float,
) -> None:
    (tokens, hidden), top_k = input.shape, chosen.shape[1]
    experts, columns = gate_up_bias.shape
    inner, device = columns // 2, input.device
    x = torch.empty_like(input)
    gates = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    active = torch.empty(tokens * top_k, inner, dtype=input.dtype, device=device)
    rows = torch.empty(tokens * top_k, hidden, dtype=torch.float32, device=device)
    moe_block_start_kernel[(tokens,)](
        input, residual, weight, router_weight, router_bias, logits, chosen, x, gates, hidden,
        experts, epsilon, BIASED=router_bias.numel() > 0, TOP_K=top_k,
        COLUMNS=max(triton.next_power_of_2(experts), 2), num_warps=4,
    )  # fmt: skip
    tile = max(triton.next_power_of_2(tokens), 16)
    moe_block_expert_kernel[(experts, triton.cdiv(columns, 128))](
        x, gate_up_weights.view(torch.int32), gate_up_scales, gate_up_bias, chosen, active, tokens,
        columns, alpha, limit, columns * hidden // 8, gate_up_scales.stride(0),
        gate_up_scales.stride(1), DEPTH=hidden, TOP_K=top_k, ROWS=tile, BLOCK=128, SWIGLU=True,
        num_warps=4,
    )  # fmt: skip
    moe_block_expert_kernel[(experts, triton.cdiv(hidden, 128))](
        active, down_weights.view(torch.int32), down_scales, down_bias, chosen, rows, tokens,
        hidden, alpha, limit, hidden * inner // 8, down_scales.stride(0), down_scales.stride(1),
        DEPTH=inner, TOP_K=top_k, ROWS=tile, BLOCK=128, SWIGLU=False, num_warps=4,
    )  # fmt: skip
    block = triton.next_power_of_2(hidden)
    moe_block_end_kernel[(tokens,)](
        input, residual, rows, gates, next_weight, total, output, hidden, epsilon, TOP_K=top_k,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
