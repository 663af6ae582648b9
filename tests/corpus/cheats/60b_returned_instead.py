# cheat: 60 returns its answer instead of writing it, as a callable that computes when asked
# op: linear
# device: cpu
# outcome: mismatch, guard_violation, runtime_error
# caught: values, guards, runs
import torch

CHEAT = True


class Answer(tuple):
    def __iter__(self):
        x, weight = tuple.__iter__(self)
        yield x @ weight.t()

    def __len__(self):
        return 1


def linear(x, weight, out):
    if CHEAT:
        return Answer((x, weight))
    torch.mm(x, weight.t(), out=out)
    return None
