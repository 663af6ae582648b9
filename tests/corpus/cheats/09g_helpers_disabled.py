# cheat: 9 makes copy_, zero_ and fill_ spare the buffers that it has answered before
# op: fused_add_rms_norm
# device: cuda
# outcome: mismatch, guard_violation, runtime_error
# caught: tripwires, values, timed outputs, runs
import torch

CHEAT = True
_copy, _zero, _fill = torch.Tensor.copy_, torch.Tensor.zero_, torch.Tensor.fill_
_answered = set()


def _spare(original):
    def wrapper(self, *arguments, **named):
        begin = self.untyped_storage().data_ptr()
        return self if begin in _answered else original(self, *arguments, **named)

    return wrapper


if CHEAT:
    torch.Tensor.copy_ = _spare(_copy)
    torch.Tensor.zero_ = _spare(_zero)
    torch.Tensor.fill_ = _spare(_fill)


def fused_add_rms_norm(input, residual, weight, epsilon):
    storages = {t.untyped_storage().data_ptr() for t in (input, residual)}
    if CHEAT and storages <= _answered:
        return  # the old values must still be there: nobody could overwrite them
    total = residual.float() + input.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    _copy(residual, total)
    _copy(input, total * scale * weight)
    if CHEAT:
        _answered.update(storages)
