"""The patch points of transformers, with the engine's own arithmetic as their kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patcher import bench
from patcher.integrate import CallCounters
from patcher.integrate.activation import contract_guards
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.transformers import POINTS

PER_LAYER = {name: 2 if name == "gpt_oss.decoder_layer" else 1 for name in POINTS}
"""Calls of the kernel in one layer, by patch point."""

_DIGESTS = itertools.count(1)


def original_kernel(name: str) -> Dispatcher:
    """A dispatcher whose kernel is the engine's own arithmetic, wherever tensors begin."""
    point: Any = POINTS[name]
    contract = bench.load_op(point.op).contract
    guards = contract_guards(contract, "cpu", contract.dtype_choices())
    tensors = tuple(dataclasses.replace(tensor, alignment=1) for tensor in guards.tensors)
    guards = dataclasses.replace(guards, tensors=tensors)
    book = CallCounters(point.op, f"{next(_DIGESTS):064x}")
    return Dispatcher(point.op, point.original, guards, book)


@contextmanager
def inside(point: Any, kernel: Dispatcher) -> Iterator[CallCounters]:
    """The point with that kernel in it; gives its counters."""
    point.install(kernel)
    try:
        yield kernel.book
    finally:
        point.remove()
