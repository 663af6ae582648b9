# Op: mla_decode: latent attention of one new token of each request over its paged cache, whose rows
#   are keys and, but for the rotated part, values; float32.
# Arguments: query[T: tokens, heads, latent + rope], cache[T: blocks, block_size, latent + rope],
#   block_table[I: tokens, pages], lengths[I: tokens], out[T: tokens, heads, latent], scale; T:
#   bfloat16 or float16 or float32; I: int32
# Writes: out
# Needs: PyTorch alone; shipped for the CPU; any size, any strides.
# Idea: a request at a time: its rows from the block table, scores, softmax, sum. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 39fd59f7c8065b0f7c5d1d274e08e4fa02a539c2caec3136d133fd6db569a44a

import torch


def mla_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    out.zero_()
    for token, length in enumerate(lengths.tolist()):
        places = torch.arange(length)
        blocks = block_table[token].long()[places // cache.shape[1]]
        rows = cache[blocks, places % cache.shape[1]].float()
        weights = (query[token].float() @ rows.T * scale).softmax(-1)
        out[token] = (weights @ rows[:, : out.shape[2]]).to(out.dtype)
