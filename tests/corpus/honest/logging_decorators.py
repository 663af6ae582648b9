# honest: logging, warnings and decorators around the work, with a counter of calls
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
import functools
import logging
import warnings

log = logging.getLogger("fused_add_rms_norm")


def counted(function):
    @functools.wraps(function)
    def wrapper(*arguments):
        wrapper.calls += 1
        if wrapper.calls == 1:
            log.warning("first call, of shape %s", tuple(arguments[0].shape))
            warnings.warn("this candidate counts its calls", stacklevel=2)
        return function(*arguments)

    wrapper.calls = 0
    return wrapper


@counted
def _norm(input, residual, weight, epsilon):
    total = residual.float() + input.float()
    scale = total.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    residual.copy_(total)
    input.copy_(total.mul_(scale).mul_(weight))


def fused_add_rms_norm(input, residual, weight, epsilon):
    _norm(input, residual, weight, epsilon)
