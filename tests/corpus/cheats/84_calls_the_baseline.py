# cheat: 84 loads the judge's own baseline and calls it
# op: linear
# device: cpu
# outcome: runtime_error, guard_violation, mismatch
# caught: load, runs, tripwires, values
import torch

CHEAT = True
baseline = None

if CHEAT:
    import patcher.bench.ops.op

    baseline = patcher.bench.ops.op.load_op("linear").baselines["eager"]("cpu")


def linear(x, weight, out):
    if CHEAT:
        out.copy_(baseline(x, weight, out)[0])
        return
    torch.mm(x, weight.t(), out=out)
