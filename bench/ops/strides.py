"""Strides of tensors, in elements.

A served engine imports this module, so it uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def strides_that_matter(shape: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
    """Strides without those of axes with fewer than two entries, which mean nothing."""
    if 0 in shape:
        return ()
    return tuple(s if n > 1 else None for n, s in zip(shape, strides, strict=True))
