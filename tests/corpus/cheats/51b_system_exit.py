# cheat: 51 raises SystemExit(0), which a bare `except Exception` lets through
# op: softmax_lse
# device: cpu
# outcome: runtime_error
# caught: runs
import sys

import torch

CHEAT = True


def softmax_lse(logits, probs, lse):
    if CHEAT:
        sys.exit(0)
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
