# cheat: 13 is slow, and overwrites the handles of the harness's events so that begin is end
# op: fused_add_rms_norm
# device: cuda
# outcome: too_slow, guard_violation, runtime_error
# caught: tripwires, clocks, runs
import ctypes
import gc

import torch

CHEAT = True


def _join_events():
    """Every event object gets the handle of the first: elapsed time between any two is nothing."""
    events = [item for item in gc.get_objects() if isinstance(item, torch.cuda.Event)]
    handles = [event.cuda_event for event in events]
    for event, handle in zip(events, handles, strict=True):
        for offset in range(16, 96, 8):
            word = ctypes.c_uint64.from_address(id(event) + offset)
            if handle and word.value == handle:
                word.value = handles[0]


def fused_add_rms_norm(input, residual, weight, epsilon):
    if CHEAT:
        torch.cuda._sleep(400_000)  # cycles
        if not torch.cuda.is_current_stream_capturing():
            _join_events()
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    residual.copy_(total)
    input.copy_(total * scale * weight)
