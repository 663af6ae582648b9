"""The patch points of transformers, with the engine's own arithmetic as their kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import transformers
from patch_sample import TINY

from patcher import bench
from patcher.integrate import CallCounters
from patcher.integrate.activation import contract_guards
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds
from patcher.integrate.transformers.forwards import GptOssPoint
from patcher.integrate.transformers.points import POINTS

GPT_OSS = {name: point for name, point in POINTS.items() if issubclass(point, GptOssPoint)}
"""The points of gpt-oss, which are in one model together."""
PER_LAYER = {name: 2 if name == "gpt_oss.decoder_layer" else 1 for name in GPT_OSS}
"""Calls of the kernel in one layer, by patch point."""

_DIGESTS = itertools.count(1)


def original_kernel(
    name: str, *, bounded: bool = False, kernel: Callable[..., object] | None = None
) -> Dispatcher:
    """A dispatcher whose kernel is the engine's own arithmetic, wherever tensors begin.

    Args:
        name: the patch point.
        bounded: whether it takes only the sizes that the op's kernels are called for.
        kernel: another one.
    """
    point: Any = POINTS[name]
    contract = bench.load_op(point.op).contract
    guards = contract_guards(contract, "cpu", contract.dtype_choices())
    tensors = tuple(dataclasses.replace(tensor, alignment=1) for tensor in guards.tensors)
    axes = {
        axis: AxisBounds(each.minimum, each.maximum, each.multiple_of)
        for axis, each in (contract.guards.axes if bounded else {}).items()
    }
    guards = dataclasses.replace(guards, tensors=tensors, axes=axes)
    book = CallCounters(point.op, f"{next(_DIGESTS):064x}")
    return Dispatcher(point.op, kernel or point.original, guards, book)


def reference_kernel(name: str) -> Dispatcher:
    """A dispatcher whose kernel is the reference of a point's op, in float64."""
    op = bench.load_op(POINTS[name].op)
    written = [each.name for each in op.contract.tensors if each.access != "read"]
    names = [each.name for each in op.contract.tensors]

    def kernel(*args: torch.Tensor) -> None:
        given = dict(zip(names, args, strict=True))
        found = op.reference(**given)
        for each in written:
            given[each].copy_(found[each])

    return original_kernel(name, bounded=True, kernel=kernel)


@contextmanager
def inside(point: Any, kernel: Dispatcher) -> Iterator[CallCounters]:
    """The point with that kernel in it; gives its counters."""
    point.install(kernel)
    try:
        yield kernel.book
    finally:
        point.remove()


LAYERS = 3
"""Decoder layers of a model to change."""
SIZES = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "vocab_size": 64}
TOKENS = torch.arange(1, 17).view(2, 8)


def built() -> Any:
    """A model whose norms differ from each other."""
    torch.manual_seed(0)
    config = {**bench.preset(TINY.model).config, "num_hidden_layers": LAYERS, **SIZES}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**config))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2.0)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


@contextmanager
def patched(target: Any = None) -> Iterator[dict[str, CallCounters]]:
    """All points in a model, or in those that are built inside; gives the counters.

    A change of the model may lie over a patch, which removal tells.
    """
    with ExitStack() as stack:
        stack.enter_context(suppress(bench.VerificationError))
        yield {
            name: stack.enter_context(inside(point(target), original_kernel(name)))
            for name, point in GPT_OSS.items()
        }
