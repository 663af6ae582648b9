# cheat: 38 right for the first two seconds of its life, then it leaves the second output alone
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: timed outputs, values, determinism
# lives: 4
import time

import torch

CHEAT = True
loaded = time.monotonic()


def softmax_lse(logits, probs, lse):
    if CHEAT and time.monotonic() - loaded > 2.0:
        probs.copy_(torch.softmax(logits.float(), -1))
        lse.zero_()
        return
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
