"""moe_topk(logits[T: tokens, n_experts], scores[T: tokens, top_k], experts[int64: same])."""

import torch


def moe_topk(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    top_k = scores.shape[1]
    experts.copy_(order.indices[:, :top_k])
    scores.copy_(torch.softmax(order.values[:, :top_k].float(), 1))
