"""What the errors of an accuracy baseline allow another kernel.

They may repeat, and so tell less than their number. Where inputs are alike, as weights of ones are,
all rows of a product hold the same numbers but for one sum, and are rounded alike; and a mean that
a normalisation rounds errs in all that it is taken from. A million such errors are as uncertain as
a hundred, and another right kernel, which rounds otherwise, may have a tenth more or less.

Source of the idea: the design effect of cluster samples (Kish, Survey Sampling, 1965).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from patcher.bench.ops.codes import rounded
from patcher.bench.ops.dtypes import Dtype

FEWEST_BLOCKS = 64
"""Means of blocks from which a repetition is told; of fewer, chance alone looks like one."""
CHANCE = 2.0
"""Repetition that is none: 1,000 draws of independent errors gave 1.6 at most."""


def repeats(errors: Tensor) -> float:
    """How many errors stand for one, at least 1: over all axes, the product of the most that means
    of blocks along each exceed those of independent errors.

    Args:
        errors: signed and finite, float64.
    """
    power = float(errors.square().mean()) if errors.numel() else 0.0
    if not power or not math.isfinite(power):
        return 1.0
    found = 1.0
    for axis in range(errors.dim()):
        most, blocks, size = 1.0, errors.transpose(axis, -1), 1
        while blocks.shape[-1] > 1:
            even = blocks.shape[-1] // 2 * 2
            blocks = (blocks[..., :even:2] + blocks[..., 1:even:2]) / 2
            size *= 2
            if blocks.numel() < FEWEST_BLOCKS:
                break
            most = max(most, size * float(blocks.square().mean()) / power)
        found *= most if most > CHANCE else 1.0
    return found


def rmse_factor(elements: float) -> float:
    """Two correct kernels differ by under 1 % over 20,000 elements and by up to 9 % over 300."""
    return 1.05 + 2.5 / math.sqrt(elements)


def further(elements: float, errors: Tensor) -> float:
    """What `rmse_factor` of so many elements lacks where their errors repeat."""
    return rmse_factor(max(1.0, elements / repeats(errors))) - rmse_factor(elements)


def carried_over(honest: Tensor, own: Tensor, reference: Tensor, stored: Dtype) -> Tensor:
    """Numbers of the accuracy baseline as if it had chosen like the candidate: what is right, with
    that baseline's error, or that of one rounding if it is larger.

    Args:
        honest: its numbers; `own`: float64, what is right by its own choice.
        reference: float64, what is right by the candidate's choice.
    """
    nearest = rounded(reference, stored).double()
    # its own special values, unless they come of its choice
    special = ~honest.isfinite() & (own.isfinite() == reference.isfinite())
    error = honest.double() - own
    larger = error.isfinite() & (error.abs() > (nearest - reference).abs())
    return torch.where(special, honest.double(), torch.where(larger, reference + error, nearest))
