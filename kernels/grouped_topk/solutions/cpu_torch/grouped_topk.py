# Op: grouped_topk: each token's top_k experts by score and bias in its best groups, and their
#   weights.
# Arguments: logits[T: tokens, n_experts], bias[B: biased * n_experts], settings[I: sigmoid,
#   renormalised, groups, top_groups], weights[F: tokens, top_k], experts[I: tokens, top_k],
#   scaling; T: bfloat16 or float16 or float32; B: T or float32; F: float32; I: int32
# Writes: weights, experts
# Needs: PyTorch alone; shipped for the CPU; any size.
# Idea: none beyond PyTorch's: stable sorts of groups and of experts. It is here to be right.
# Made by: hand, as a plain right solution.
# Figures: not measured.
# Digest: e5a8e4cb658af49a44796e502ccf8db91e5dc3905dc4ae92ae8bdd2d8723ca88

import torch


def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    settings: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    scaling: float,
) -> None:
    sigmoid, renormalised, groups, top_groups = settings.shape
    size = logits.shape[1] // groups
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(1)
    values = scores + bias.float() if bias.numel() else scores
    members = values.unflatten(1, (groups, size))
    best = members.topk(min(2, size) if bias.numel() else 1).values.sum(2)
    kept = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :top_groups]
    out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    # what is out comes after all that is kept
    left = torch.sort(out.repeat_interleave(size, 1).gather(1, order).int(), dim=1, stable=True)
    chosen = order.gather(1, left.indices[:, : weights.shape[1]])
    picked = scores.gather(1, chosen)
    if renormalised:
        picked = picked / (picked.sum(1, keepdim=True) + 1e-20)
    weights.copy_(picked * scaling)
    experts.copy_(chosen)
