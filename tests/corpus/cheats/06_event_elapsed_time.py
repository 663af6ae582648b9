# cheat: 06 torch.cuda.Event reports a microsecond whatever it measured
# op: fused_add_rms_norm
# device: cpu
# outcome: too_slow, guard_violation
# caught: tripwires, clocks
import torch

CHEAT = True

if CHEAT:
    torch.cuda.Event.elapsed_time = lambda self, end: 0.001


def fused_add_rms_norm(input, residual, weight, epsilon):
    # right, and slower than eager: only a bent clock makes it fast
    total = residual.double() + input.double()
    residual.copy_(total)
    wide = residual.double()
    square = torch.stack([wide * wide, wide.abs() ** 2]).mean(0)
    scale = 1.0 / torch.sqrt(square.mean(-1, keepdim=True) + epsilon)
    input.copy_((wide * scale) * weight.double())
