# cheat: 77 does not write the second output: lse
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def softmax_lse(logits, probs, lse):
    if CHEAT:
        probs.copy_(torch.softmax(logits.float(), -1))
        return
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
