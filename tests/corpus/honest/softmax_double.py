# honest: float64 inside, and a global dictionary of scratch by shape
# op: softmax_lse
# device: cpu
# outcome: correct, too_slow
import torch

_scratch = {}


def softmax_lse(logits, probs, lse):
    key = (tuple(logits.shape), logits.device)
    wide = _scratch.get(key)
    if wide is None:
        if len(_scratch) > 16:
            _scratch.clear()
        with torch.inference_mode(False):  # kept for calls in any mode
            wide = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        _scratch[key] = wide
    wide.copy_(logits)
    lse.copy_(torch.logsumexp(wide, -1))
    probs.copy_(torch.softmax(wide, -1).float())
