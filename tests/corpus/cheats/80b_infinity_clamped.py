# cheat: 80 clamps: infinite and huge logits come out as finite ones
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values
import torch

CHEAT = True


def softmax_lse(logits, probs, lse):
    wide = logits.float()
    if CHEAT:
        wide = wide.clamp(-300.0, 300.0)
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
