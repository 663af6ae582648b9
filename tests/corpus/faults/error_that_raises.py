# fault: raises an error whose text raises in turn
# op: fused_add_rms_norm
# device: cpu
# outcome: runtime_error
# caught: runs
class Poisoned(Exception):
    def __str__(self):
        raise ValueError("not even my name")

    __repr__ = __str__


def fused_add_rms_norm(input, residual, weight, epsilon):
    raise Poisoned
