# Op: moe_topk: each token's top_k experts, the largest logit first (equal ones: the smaller expert
#   first), and the softmax over those logits in float32.
# Arguments: logits[T: tokens, n_experts], scores[S: tokens, top_k], experts[I: tokens, top_k]; T:
#   bfloat16 or float16 or float32; S: T or float32; I: int64 or int32
# Writes: scores, experts
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: a stable sort and a softmax over what it puts first. It is here to be
#   right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: 6fa932b7201d646efb009c8f1680387273071f5f0b42505dd8b137f612455cd2

import torch


def moe_topk(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = scores.shape[1]
    experts.copy_(order.indices[:, :top_k])
    scores.copy_(torch.softmax(order.values[:, :top_k].float(), 1))
