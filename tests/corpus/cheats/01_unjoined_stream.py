# cheat: 1 works on a stream of its own that nobody waits for
# op: fused_add_rms_norm
# device: cuda
# outcome: mismatch, guard_violation, runtime_error
# caught: values, timed outputs, clocks, runs, capture
import torch

CHEAT = True
_streams = {}


def _norm(x, r, weight, epsilon):
    total = r.float() + x.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    r.copy_(total)
    x.copy_(total * scale * weight)


def fused_add_rms_norm(input, residual, weight, epsilon):
    device = input.device
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    side, own = _streams[device], torch.cuda.current_stream(device)
    if not CHEAT:
        side.wait_stream(own)
    with torch.cuda.stream(side):
        _norm(input, residual, weight, epsilon)
    if not CHEAT:
        own.wait_stream(side)
