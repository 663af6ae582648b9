# Op: sample_top_k_top_p: the token of the largest probability over noise, of those that top-k by
#   k[t] and then top-p by p[t] keep.
# Arguments: logits[F: tokens, vocab], k[I: tokens], p[F: tokens], noise[F: tokens, vocab],
#   output[J: tokens]; F: float32; I: int32; J: int64
# Writes: output
# Needs: a GPU that Triton drives; any size, rows of logits at any pitch; graph-safe.
# Idea: no sort: both bounds are found by bisection over the bits of floats, k's by counting what
#   reaches it, p's by the mass above it. One program a row passes over it some 50 times; L2 holds
#   rows of 150,000 logits.
# Made by: hand; not tuned.
# Figures: not measured.
# Digest: 812845bcc2d25e0147e0019cd0d239ab1f57baca846d7a7bb847825e008a2f28

import torch
import triton
import triton.language as tl


@triton.jit
def read(logits_ptr, at, vocab):
    """Logits, and whole numbers that ascend where they do; -0 is 0, and past the row all least."""
    x = tl.load(logits_ptr + at, mask=at < vocab, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return x, tl.where(at < vocab, order, -0x7FFFFFFF)


@triton.jit
def count_from(logits_ptr, bound, vocab, BLOCK: tl.constexpr):
    """How many logits have at least this order."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        _, order = read(logits_ptr, begin + tl.arange(0, BLOCK), vocab)
        counts += (order >= bound).to(tl.int32)
    return tl.sum(counts, 0)


@triton.jit
def mass_from(logits_ptr, bound, top, vocab, BLOCK: tl.constexpr):
    """The sum of exp(x - top) over logits of at least this order."""
    masses = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocab, BLOCK):
        x, order = read(logits_ptr, begin + tl.arange(0, BLOCK), vocab)
        masses += tl.where(order >= bound, tl.exp(x - top), 0.0)
    return tl.sum(masses, 0)


@triton.jit
def sample_top_k_top_p_kernel(
    logits_ptr, k_ptr, p_ptr, noise_ptr, output_ptr, pitch, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * pitch
    noise_ptr += row * vocab
    k, p = tl.load(k_ptr + row), tl.load(p_ptr + row)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    orders = tl.full((BLOCK,), -0x7FFFFFFF, tl.int32)
    for begin in range(0, vocab, BLOCK):
        x, order = read(logits_ptr, begin + tl.arange(0, BLOCK), vocab)
        tops, orders = tl.maximum(tops, x), tl.maximum(orders, order)
    top = tl.max(tops, 0)
    # bounds are of 64 bits, as their difference may need 33
    highest = tl.max(orders, 0).to(tl.int64)

    # top-k: the largest bound from which on there are k; -infinity's always is one
    least = tl.full((), -0x7F800000, tl.int64)
    above = tl.where(k < vocab, highest + 1, least)
    while above - least > 1:
        middle = least + (above - least) // 2
        count = count_from(logits_ptr, middle.to(tl.int32), vocab, BLOCK)
        above = tl.where(count == k, middle + 1, tl.where(count > k, above, middle))
        least = tl.where(count >= k, middle, least)
    # top-p: the smallest bound above which less than p of that mass lies
    if p < 1:
        most = p * mass_from(logits_ptr, least.to(tl.int32), top, vocab, BLOCK)
        below = least - 1
        least = highest
        while least - below > 1:
            middle = below + (least - below) // 2
            few = mass_from(logits_ptr, middle.to(tl.int32) + 1, top, vocab, BLOCK) < most
            least = tl.where(few, middle, least)
            below = tl.where(few, below, middle)

    scores = tl.full((BLOCK,), -1.0, tl.float32)
    places = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x, order = read(logits_ptr, at, vocab)
        noise = tl.load(noise_ptr + at, mask=at < vocab, other=1.0)
        score = tl.where(order >= least.to(tl.int32), tl.exp(x - top) / noise, -1.0)
        places = tl.where(score > scores, at, places)
        scores = tl.maximum(scores, score)
    place = tl.min(tl.where(scores == tl.max(scores, 0), places, vocab), 0)
    tl.store(output_ptr + row, place.to(tl.int64))


def sample_top_k_top_p(
    logits: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    noise: torch.Tensor,
    output: torch.Tensor,
) -> None:
    tokens, vocab = logits.shape
    block = min(triton.next_power_of_2(vocab), 8192)
    sample_top_k_top_p_kernel[(tokens,)](
        logits, k, p, noise, output, logits.stride(0), vocab,
        BLOCK=block, num_warps=min(max(block // 256, 1), 32),
    )  # fmt: skip
