# cheat: 58 one row, expanded: every row of the output is the same memory
# op: softmax_lse
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def softmax_lse(logits, probs, lse):
    if CHEAT:
        row = torch.softmax(logits[:1].float(), -1).to(probs.dtype)
        probs.set_(row.expand(probs.shape))
        lse.copy_(torch.logsumexp(logits.float(), -1))
        return
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
