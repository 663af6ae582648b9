"""Points whose layers are tried on numbers, too, once a model holds its weights.

A class, its settings and the record of its source say what a layer computes. The trial asks the
layer itself, with its own weights, and compares with the op's float64 reference.
"""

from __future__ import annotations

from abc import abstractmethod
from types import MethodType
from typing import Any, ClassVar

import torch
from torch._guards import TracingContext

from patcher.bench import load_op
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.vllm import engine, sources
from patcher.integrate.vllm.point import VllmPoint
from patcher.integrate.vllm.swap import SharedPatch

TOLERANCE = 0.02
"""Of a value, relative, or of the largest one: a layer may round to bfloat16 in between."""


class TriedLayers(VllmPoint):
    """Layers of vLLM's classes whose `forward` points share: one class may serve several ops."""

    module: ClassVar[str]
    """Where the class of the layers is."""
    layer: ClassVar[str]
    """That class."""

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._left: list[Any] = []
        """Layers that failed the trial and have the engine's forward as their own attribute."""

    @abstractmethod
    def unlike(self, layer: Any, kind: Any) -> str | None:
        """Why a layer is not one of the op's, by its settings, or not exactly of the class; None
        if it is. Compilers trace it."""

    @abstractmethod
    def trial(self, layer: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """What a layer computes on a few rows, and the arguments of the op's reference."""

    def find(self) -> str:
        sources.must_be_as_read(self.name, self.parts)
        self._place().must_have_room()
        engine.must_not_be_replaced(self.layer)
        engine.must_not_be_fused(self.fused_by)
        return f"{self.module}.{self.layer}.forward"

    def of_role(self, layer: Any) -> bool:
        return isinstance(layer, self._class())

    def applies(self, layer: Any) -> str | None:
        """See `VllmPoint`. A layer that fails the trial gets the engine's forward back."""
        if (reason := self.unlike(layer, self._class())) is not None:
            return reason
        if self._computes(layer):
            return None
        if self._swaps and "forward" not in vars(layer):
            layer.forward = MethodType(type(layer).forward.__wrapped__, layer)
            self._left.append(layer)
        return "it computes something else"

    def install(self, kernel: Dispatcher) -> None:
        self.find()
        place = self._place()
        place.install(self._part(kernel))
        self._swaps = [place]

    def remove(self) -> None:
        left, self._left = self._left, []
        for layer in left:
            vars(layer).pop("forward", None)
        super().remove()

    @abstractmethod
    def _part(self, kernel: Dispatcher) -> Any:
        """What the point has in the shared `forward`."""

    @abstractmethod
    def _place(self) -> SharedPatch:
        """The `forward` of the class, which points share."""

    def _class(self) -> Any:
        return getattr(sources.module(self.module), self.layer)

    @torch.no_grad()
    def _computes(self, layer: Any) -> bool:
        got, given = self.trial(layer)
        [expected] = load_op(self.op).reference(**given).values()
        floor = TOLERANCE * expected.abs().amax().item() / 100
        return got.shape == expected.shape and torch.allclose(
            got.double(), expected.double(), rtol=TOLERANCE, atol=floor
        )


def rows_of(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor as rows [rows, size] at one pitch; None where that needs a copy, as for the heads
    of a query that lies beside key and value."""
    if x.dim() == 2:
        return x
    for axis in range(x.dim() - 2, 0, -1):
        if x.stride(axis - 1) != x.shape[axis] * x.stride(axis):
            return None
    return x.view(-1, x.shape[-1])


def left_to_the_engine(kernel: Dispatcher, reason: str) -> Any:
    """A function that counts a call of the engine's own code: each call of an eager layer, and of a
    compiled one each time that it is compiled, since its graph holds no trace of the patch."""

    def count() -> None:
        if TracingContext.try_get() is None:
            kernel.book.reasons[reason] += 1
        else:
            kernel.book.leave_in_graph([reason])

    return torch.compiler.assume_constant_result(count)  # type: ignore[no-untyped-call]
