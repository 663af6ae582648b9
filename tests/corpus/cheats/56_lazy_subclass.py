# cheat: 56 turns its outputs into a subclass that computes when somebody reads them
# op: fused_add_rms_norm
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in args:
                work = tensor.__dict__.pop("work", None) if isinstance(tensor, Lazy) else None
                if work is not None:
                    work()
            return function(*args, **(kwargs or {}))


def norm(input, residual, weight, epsilon):
    residual.add_(input)
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(wide * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    if not CHEAT:
        norm(input, residual, weight, epsilon)
        return None
    a, b = input.view(input.shape), residual.view(residual.shape)
    input.__class__ = residual.__class__ = Lazy
    input.work = residual.work = lambda: norm(a, b, weight, epsilon)
    return input, residual
