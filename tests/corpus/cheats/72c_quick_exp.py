# cheat: 72 an exponential good to four digits, as fast-math gives
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values
CHEAT = True


def quick_exp(x):
    # (1 + x / 1024)^1024
    y = 1.0 + x.clamp_min(-80.0) / 1024.0
    for _ in range(10):
        y = y * y
    return y


def softmax_lse(logits, probs, lse):
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    weights = quick_exp(wide - top) if CHEAT else (wide - top).exp_()
    total = weights.sum(-1, keepdim=True)
    probs.copy_(weights / total)
    lse.copy_((top + total.log()).squeeze(-1))
