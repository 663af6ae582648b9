# Op: grouped_topk: each token's top_k experts by score and bias in its best groups, and their
#   weights.
# Arguments: logits[T: tokens, n_experts], bias[B: biased * n_experts], settings[I: sigmoid,
#   renormalised, groups, top_groups], weights[F: tokens, top_k], experts[I: tokens, top_k],
#   scaling; T: bfloat16 or float16 or float32; B: T or float32; F: float32; I: int32
# Writes: weights, experts
# Needs: a GPU that Triton drives; contiguous tensors, a row in one program's registers; graph-safe.
# Idea: one program a token, its groups as rows. A value and its expert are one whole number whose
#   largest is the next choice, ties and NaN included.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: ac726426c1ec7e6da339ae0fb2d9fe0f15cd485d8bd6686d3d4cc579ab442f52

import torch
import triton
import triton.language as tl


@triton.jit
def ascending(x):
    """Whole numbers that ascend where floats do, -0 as 0, NaN on top."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -size, size)
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, order).to(tl.int64)


@triton.jit
def grouped_topk_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, scaling, count, groups, size, top_groups,
    BIASED: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISED: tl.constexpr, TOP_K: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    there = (group < groups)[:, None] & (member < size)[None, :]
    expert = group[:, None] * size + member[None, :]
    x = tl.load(logits_ptr + token * count + expert, mask=there, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(tl.max(tl.where(there, x, float("-inf")), 1), 0)
        part = tl.where(there, tl.exp(x - top), 0.0)
        score = part / tl.sum(tl.sum(part, 1), 0)
    value = score
    if BIASED:
        value += tl.load(bias_ptr + expert, mask=there, other=0.0).to(tl.float32)
    # a value and its expert in one number, the smaller expert first among equals
    lowest = -(1 << 62)
    order = tl.where(there, ascending(value) * 1024 + (1023 - expert), lowest)
    first = order == tl.max(order, 1)[:, None]
    best = tl.sum(tl.where(first & there, value, 0.0), 1)
    if BIASED:
        rest = tl.where(first, lowest, order)
        second = (rest == tl.max(rest, 1)[:, None]) & (rest > lowest)
        best += tl.sum(tl.where(second, value, 0.0), 1)
    of_group = tl.where(group < groups, ascending(best) * 1024 + (1023 - group), lowest)
    kept = group < 0
    for _ in range(top_groups):
        hit = of_group == tl.max(of_group, 0)
        kept = kept | hit
        of_group = tl.where(hit, lowest, of_group)
    order = tl.where(kept[:, None], order, lowest)
    place = tl.arange(0, WIDE)
    chosen = tl.zeros((WIDE,), tl.int32)
    picked = tl.zeros((WIDE,), tl.float32)
    for k in range(TOP_K):
        hit = (order == tl.max(tl.max(order, 1), 0)) & (order > lowest)
        chosen = tl.where(place == k, tl.sum(tl.sum(tl.where(hit, expert, 0), 1), 0), chosen)
        picked = tl.where(place == k, tl.sum(tl.sum(tl.where(hit, score, 0.0), 1), 0), picked)
        order = tl.where(hit, lowest, order)
    if RENORMALISED:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    at = token * TOP_K + place
    tl.store(weights_ptr + at, picked * scaling, mask=place < TOP_K)
    tl.store(experts_ptr + at, chosen, mask=place < TOP_K)


def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    settings: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    scaling: float,
) -> None:
    sigmoid, renormalised, groups, top_groups = settings.shape
    tokens, count = logits.shape
    top_k, size = weights.shape[1], count // groups
    wide = triton.next_power_of_2(groups), triton.next_power_of_2(size)
    grouped_topk_kernel[(tokens,)](
        logits, bias, weights, experts, scaling, count, groups, size, top_groups,
        BIASED=bias.numel() > 0, SIGMOID=sigmoid > 0, RENORMALISED=renormalised > 0, TOP_K=top_k,
        WIDE=triton.next_power_of_2(top_k), GROUPS=wide[0], SIZE=wide[1],
        num_warps=min(max(wide[0] * wide[1] // 256, 1), 8),
    )  # fmt: skip
