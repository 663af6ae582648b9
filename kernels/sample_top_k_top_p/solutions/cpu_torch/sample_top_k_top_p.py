# Op: sample_top_k_top_p: the token of the largest probability over noise, of those that top-k by
#   k[t] and then top-p by p[t] keep.
# Arguments: logits[F: tokens, vocab], k[I: tokens], p[F: tokens], noise[F: tokens, vocab],
#   output[J: tokens]; F: float32; I: int32; J: int64
# Writes: output
# Needs: PyTorch alone; shipped for the CPU; any size, rows at any pitch.
# Idea: a sort, and sums of probabilities from the top. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 61506b1933f785cc24836c6c710d1331517ef049c201859ebb9824e645ba08e2

import torch


def sample_top_k_top_p(
    logits: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor,
    noise: torch.Tensor,
    output: torch.Tensor,
) -> None:
    found, order = logits.sort(dim=1, descending=True)
    least = found.gather(1, k.long().unsqueeze(1) - 1)
    probabilities = found.masked_fill(found < least, -torch.inf).softmax(1)
    above = probabilities.cumsum(1) - probabilities
    kept = probabilities.masked_fill((above >= p.unsqueeze(1)) & (p < 1).unsqueeze(1), 0.0)
    best = (kept / noise.gather(1, order)).argmax(1, keepdim=True)
    output.copy_(order.gather(1, best).squeeze(1))
