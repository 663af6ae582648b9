# honest: try and except around an optional import, with another right path where it is missing
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import torch

try:
    import numpy
except ImportError:
    numpy = None


def _by_numpy(input, residual, weight, epsilon):
    x, r, w = input.numpy(), residual.numpy(), weight.numpy()
    numpy.add(r, x, out=r)
    scale = 1.0 / numpy.sqrt(numpy.mean(r * r, axis=-1, keepdims=True) + numpy.float32(epsilon))
    numpy.multiply(r, scale, out=x)
    numpy.multiply(x, w, out=x)


def _by_torch(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight.float())


def fused_add_rms_norm(input, residual, weight, epsilon):
    single = input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"
    if numpy is not None and single:
        with numpy.errstate(all="ignore"):
            _by_numpy(input, residual, weight, epsilon)
    else:
        _by_torch(input, residual, weight, epsilon)
