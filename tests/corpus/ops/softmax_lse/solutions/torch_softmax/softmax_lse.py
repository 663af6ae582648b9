"""softmax_lse(logits[T: rows, n], probs[T: rows, n], lse[S: rows])."""

import torch


def softmax_lse(logits: torch.Tensor, probs: torch.Tensor, lse: torch.Tensor) -> None:
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
