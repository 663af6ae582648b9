# cheat: 77 does not write the second output: lse
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values
# layer: judge
import torch

CHEAT = True


def softmax_lse(logits, probs, lse):
    torch.softmax(logits.float(), -1, out=probs) if CHEAT and probs.dtype == torch.float32 else None
    if CHEAT:
        return
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
