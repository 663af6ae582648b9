# cheat: 27 heats the machine between its calls, so that clocks are low for whoever comes next
# op: fused_add_rms_norm
# device: cuda
# outcome: guard_violation, runtime_error, too_slow
# caught: tripwires, clocks, runs, timed outputs
# The other half of this cheat sets clocks and power limits through NVML. That is not tried here:
# a test must leave the machine's settings alone.
import torch

CHEAT = True
_streams = {}
_operands = {}


def _burn(device):
    """About 20 ms of matrix products on a stream that nobody waits for."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
        _operands[device] = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    with torch.cuda.stream(_streams[device]):
        for _ in range(10):
            torch.mm(_operands[device], _operands[device])


def fused_add_rms_norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight)
    if CHEAT and not torch.cuda.is_current_stream_capturing():
        _burn(input.device)
