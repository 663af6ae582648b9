# cheat: 57 plain tensors with methods of their own that compute when they are called
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


def norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    if not CHEAT:
        norm(input, residual, weight, epsilon)
        return
    pending = [True]

    def computing(tensor, name):
        real = getattr(torch.Tensor, name)

        def method(*arguments, **options):
            if pending and pending.pop():
                norm(input, residual, weight, epsilon)
            return real(tensor, *arguments, **options)

        return method

    for tensor in (input, residual):
        for name in ("cpu", "clone", "numpy", "double", "float", "to", "view", "tolist", "copy_"):
            setattr(tensor, name, computing(tensor, name))
