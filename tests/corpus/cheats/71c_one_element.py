# cheat: 71 leaves out one element of the whole output, another one each time
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values, timed outputs
import torch

CHEAT = True
calls = 0


def softmax_lse(logits, probs, lse):
    global calls
    calls += 1
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
    if CHEAT:
        flat = probs.view(-1)
        flat[(calls * 7919) % flat.numel()] = 0.0
