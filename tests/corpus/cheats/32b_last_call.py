# cheat: 32 hands back the answer of the last call where the shape is the same
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values, timed outputs, determinism
import torch

CHEAT = True
last = None


def softmax_lse(logits, probs, lse):
    global last
    if CHEAT and last is not None and last[0].shape == logits.shape:
        probs.copy_(last[1])
        lse.copy_(last[2])
        return
    wide = logits.float()
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1))
    last = (logits.clone(), probs.clone(), lse.clone())
