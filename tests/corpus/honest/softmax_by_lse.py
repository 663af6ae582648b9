# honest: gets the probabilities back from the lse, and treats rows of infinities on their own
# op: softmax_lse
# device: cpu
# outcome: correct, too_slow
import torch


def softmax_lse(logits, probs, lse):
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    weights = torch.exp(wide - top)
    total = weights.sum(-1, keepdim=True)
    probs.copy_(weights / total)
    # inf - inf is NaN: where the largest is infinite, it is the answer
    sums = top + torch.log(total)
    lse.copy_(torch.where(top.isinf(), top, sums).squeeze(-1))
