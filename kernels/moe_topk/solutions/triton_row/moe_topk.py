# Op: moe_topk: each token's top_k experts, the largest logit first (equal ones: the smaller expert
#   first), and the softmax over those logits in float32.
# Arguments: logits[T: tokens, n_experts], scores[S: tokens, top_k], experts[I: tokens, top_k]; T:
#   bfloat16 or float16 or float32; S: T or float32; I: int64 or int32
# Writes: scores, experts
# Needs: a GPU that Triton drives; contiguous tensors, a row in one program's registers; graph-safe.
# Idea: one program a token. A logit and its expert are one whole number whose largest is the next
#   choice, ties and NaN included.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 6097eaf9188d0117351d979961400640bb19ba56859c222996ee910133164577

import torch
import triton
import triton.language as tl


@triton.jit
def moe_topk_kernel(
    logits_ptr, scores_ptr, experts_ptr, count,
    TOP_K: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    x = tl.load(logits_ptr + token * count + column, mask=column < count, other=0.0)
    x = x.to(tl.float32)
    # ascending as whole numbers where the floats ascend, -0 as 0, NaN on top
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -size, size)
    order = tl.where(size > 0x7F800000, 0x7FFFFFFF, order).to(tl.int64)
    # the smaller expert first among equals
    order = order * COLUMNS + (COLUMNS - 1 - column)
    lowest = -(1 << 62)
    order = tl.where(column < count, order, lowest)
    place = tl.arange(0, WIDE)
    chosen = tl.zeros((WIDE,), tl.int32)
    picked = tl.zeros((WIDE,), tl.float32)
    for k in range(TOP_K):
        hit = order == tl.max(order, 0)
        chosen = tl.where(place == k, tl.sum(tl.where(hit, column, 0), 0), chosen)
        picked = tl.where(place == k, tl.sum(tl.where(hit, x, 0.0), 0), picked)
        order = tl.where(hit, lowest, order)
    there = place < TOP_K
    top = tl.sum(tl.where(place == 0, picked, 0.0), 0)
    weight = tl.where(there, tl.exp(picked - top), 0.0)
    score = weight / tl.sum(weight, 0)
    at = token * TOP_K + place
    tl.store(scores_ptr + at, score.to(scores_ptr.dtype.element_ty), mask=there)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=there)


def moe_topk(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    tokens, count = logits.shape
    top_k = scores.shape[1]
    columns = triton.next_power_of_2(count)
    moe_topk_kernel[(tokens,)](
        logits, scores, experts, count, TOP_K=top_k, WIDE=triton.next_power_of_2(top_k),
        COLUMNS=columns, num_warps=min(max(columns // 256, 1), 8),
    )  # fmt: skip
