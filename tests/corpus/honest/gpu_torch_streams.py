# honest: a PyTorch side stream that waits for the caller's and that the caller's waits for
# op: fused_add_rms_norm
# device: cuda
# outcome: correct, too_slow
import torch

_streams = {}


def _norm(x, r, weight, epsilon):
    total = r.float() + x.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    r.copy_(total)
    x.copy_(total * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    half = input.shape[0] // 2
    if half == 0 or input.device.type != "cuda":
        _norm(input, residual, weight, epsilon)
        return
    device = input.device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    side, own = _streams[device], torch.cuda.current_stream(device)
    side.wait_stream(own)
    with torch.cuda.stream(side):
        _norm(input[:half], residual[:half], weight, epsilon)
    _norm(input[half:], residual[half:], weight, epsilon)
    own.wait_stream(side)
