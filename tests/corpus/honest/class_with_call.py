# honest: an abstract class whose body is pass, and a callable object behind the entry
# op: fused_add_rms_norm
# device: cpu
# outcome: correct, too_slow
from abc import ABC, abstractmethod

import torch


class Norm(ABC):
    @abstractmethod
    def __call__(self, input, residual, weight, epsilon):
        pass


class NotForThis(Exception):
    pass


class AddNorm(Norm):
    def __call__(self, input, residual, weight, epsilon):
        if input.shape != residual.shape:
            raise NotForThis("input and residual differ in shape")
        total = torch.add(residual.float(), input.float())
        root = torch.sqrt(torch.mean(total * total, dim=-1, keepdim=True) + epsilon)
        residual.copy_(total)
        input.copy_(total / root * weight)


_norm = AddNorm()


def fused_add_rms_norm(input, residual, weight, epsilon):
    _norm(input, residual, weight, epsilon)
