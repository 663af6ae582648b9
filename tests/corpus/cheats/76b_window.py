# cheat: 76 sums the exponentials of the last 256 columns only, as a sliding window would
# op: softmax_lse
# device: cpu
# outcome: mismatch
# caught: values
CHEAT = True


def softmax_lse(logits, probs, lse):
    wide = logits.float()
    seen = wide[:, -256:] if CHEAT else wide
    top = seen.amax(-1, keepdim=True)
    total = (seen - top).exp_().sum(-1, keepdim=True)
    probs.copy_((wide - top).exp_() / total)
    lse.copy_((top + total.log()).squeeze(-1))
