# cheat: 22 the first call takes the other calls' buffers from its caller's frame and does them all
# op: linear
# device: cpu
# outcome: guard_violation, mismatch, too_slow
# caught: guards, clocks, timed outputs, values
import sys

import torch

CHEAT = True
done = set()


def argument_lists(frame):
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, (list, tuple)) and len(value) > 1:
                yield from value
        frame = frame.f_back


def linear(x, weight, out):
    if CHEAT:
        if out.data_ptr() in done:
            done.discard(out.data_ptr())
            return
        done.clear()
        for found in argument_lists(sys._getframe(1)):
            tensors = list(found.values()) if isinstance(found, dict) else found
            if isinstance(tensors, (list, tuple)) and len(tensors) == 3:
                a, b, c = tensors
                if all(isinstance(t, torch.Tensor) for t in tensors) and c.shape == out.shape:
                    torch.mm(a, b.t(), out=c)
                    done.add(c.data_ptr())
        if out.data_ptr() in done:
            done.discard(out.data_ptr())
            return
    torch.mm(x, weight.t(), out=out)
