"""The calls that a patched kernel supports: shapes, dtypes, strides, devices, alignment.

A served engine imports this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

_EXACT = 128
"""Receipts list row counts up to this exactly, larger ones by the next power of two."""
FOREIGN = "a tensor with operators of its own"
"""Why a call with a tensor of another class falls back; see `dispatches_itself`."""


@dataclass(frozen=True)
class TensorGuard:
    """The requirements of one tensor of the contract."""

    name: str
    axes: tuple[str, ...]
    """Names of its axes, or arithmetic; see `CallGuards.solve`."""
    dtype: str
    """A dtype symbol of the contract."""
    mutated: bool
    """Whether the kernel writes to it."""
    layout: Literal["contiguous", "rows", "strided"] = "contiguous"
    """The strides that the kernel supports, besides those of a contiguous tensor: `rows`: a pitch
    between dense rows; `strided`: any at which dense rows do not overlap."""
    alignment: int = 1
    """Alignment in bytes of the first element, and of the strides of what is not contiguous."""
    in_part: bool = False
    """Whether a call writes only a part of it, while others may write the rest."""

    def misplaced(self, tensor: torch.Tensor) -> str | None:
        """Why the kernel does not support this tensor's strides or address."""
        if tensor.data_ptr() % self.alignment:
            return "not aligned"
        if tensor.is_contiguous():
            return None
        if self.layout == "contiguous" or tensor.dim() < 2 or tensor.stride(-1) != 1:
            return "not contiguous"
        outer = [
            (stride, size)
            for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if size > 1
        ]
        item = tensor.element_size()
        if any(stride * item % self.alignment for stride, _ in outer):
            return "not aligned"
        extent = tensor.shape[-1]  # elements from the first to the last
        for stride, size in sorted(outer):
            if stride < extent:
                return "elements that share a place"
            extent += (size - 1) * stride
        if self.layout == "rows":
            follows = tensor.stride(-2)
            for axis in range(tensor.dim() - 2, 0, -1):
                follows *= tensor.shape[axis]
                if tensor.shape[axis - 1] > 1 and tensor.stride(axis - 1) != follows:
                    return "rows without one pitch"
        return None


@dataclass(frozen=True)
class AxisBounds:
    """The sizes of an axis that the kernel supports."""

    minimum: int = 0
    maximum: int | None = None
    multiple_of: int = 1


@dataclass(frozen=True)
class CallGuards:
    """The calls that the patched kernel supports; tensors and scalars in the contract's order."""

    device: str
    """`cpu` or `cuda`."""
    tensors: tuple[TensorGuard, ...]
    scalars: tuple[tuple[str, type], ...]
    """Name and type (`float` or `int`)."""
    dtypes: tuple[Mapping[str, torch.dtype], ...]
    """Supported combinations, by dtype symbol."""
    axes: Mapping[str, AxisBounds] = field(default_factory=dict)
    """Bounds by axis."""
    shapes: tuple[tuple[Mapping[str, int], str, AxisBounds], ...] = ()
    """Sizes of a shape, and the bounds of an axis that count there in place of those in `axes`."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """Supported compute capabilities; empty for any."""
    graph_safe: bool = True
    """Whether the kernel may be recorded in a CUDA graph."""
    solve: Callable[[list[tuple[int, ...]]], Mapping[str, int]] | None = None
    """Computes axis sizes from the shapes of the tensors, if the contract's axes are arithmetic.
    It raises ValueError if the shapes do not fit; if that has an `expression`, the reason for a
    fallback names it, and not the sizes."""

    def refusal(self, args: tuple[Any, ...]) -> str | None:
        """Why the guards refuse these arguments; None if they allow them.

        The answer depends only on shape, strides, dtype, device and alignment.
        """
        tensors = args[: len(self.tensors)]
        for guard, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.device.type != self.device:
                return f"device {tensor.device.type}"
            if tensor.device != tensors[0].device:
                return "tensors on several devices"
            if tensor.dim() != len(guard.axes):
                return f"{guard.name} has {tensor.dim()} axes"
        sizes, reason = self._sizes(tensors)
        return reason or self._dtype(tensors) or self._place(tensors) or self._size(sizes)

    def refusal_for_good(self, constants: Mapping[str, torch.Tensor]) -> str | None:
        """Why no call with some tensors can ever be allowed; None if one can.

        A tensor on another device may be offloaded: an engine brings it before each call.

        Args:
            constants: tensors that every call passes, such as a layer's weight, by their names in
                the contract.
        """
        sizes: dict[str, int] = {}
        known = [(g, constants[g.name]) for g in self.tensors if g.name in constants]
        for guard, tensor in known:
            if tensor.dim() == len(guard.axes) and not any(
                tensor.dtype == choice[guard.dtype] for choice in self.dtypes
            ):
                return f"{guard.name} in {_short(tensor)}"
            if reason := self._size_for_good(guard, tensor, sizes):
                return reason
            here = tensor.device.type == self.device
            if here and (reason := guard.misplaced(tensor)):
                return f"{guard.name} {reason}"
        dtypes = [(guard.dtype, tensor.dtype) for guard, tensor in known]
        if not any(all(choice[name] == dtype for name, dtype in dtypes) for choice in self.dtypes):
            return f"dtype {'/'.join(_short(tensor) for _, tensor in known)}"
        return None

    def refusal_of_sizes(self, constants: Mapping[str, torch.Tensor]) -> str | None:
        """`refusal_for_good` by the sizes alone, such as those of a model without weights."""
        sizes: dict[str, int] = {}
        known = ((g, constants[g.name]) for g in self.tensors if g.name in constants)
        reasons = (self._size_for_good(guard, tensor, sizes) for guard, tensor in known)
        return next(filter(None, reasons), None)

    def _size_for_good(
        self, guard: TensorGuard, tensor: torch.Tensor, sizes: dict[str, int]
    ) -> str | None:
        """Why no call with a tensor of this size can be allowed, beside others of these sizes."""
        if tensor.dim() != len(guard.axes):
            return f"{guard.name} with {tensor.dim()} axes"
        for axis, size in zip(guard.axes, tensor.shape, strict=True):
            # what is arithmetic depends on sizes of other tensors
            if axis.isidentifier() and sizes.setdefault(axis, size) != size:
                return f"shapes that do not fit: {axis}"
            if any(axis == swept for _, swept, _ in self.shapes):
                continue  # it depends on the shape
            bounds = self.axes.get(axis)
            if bounds is not None and (reason := _beyond(axis, size, bounds)):
                return reason
        return None

    def label(self, tensors: tuple[torch.Tensor, ...]) -> str:
        """Shape bucket and dtypes, as receipts name them: `tokens=8 hidden=2880 bfloat16`."""
        sizes, _ = self._sizes(tensors)
        rows = next(iter(sizes), None)  # the other axes are the model's and have few sizes
        shapes = " ".join(
            f"{axis}={_bucket(size) if axis == rows else size}" for axis, size in sizes.items()
        )
        return f"{shapes} {'/'.join(dict.fromkeys(map(_short, tensors)))}"

    def _sizes(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Mapping[str, int], str | None]:
        if self.solve is not None:
            try:
                return self.solve([tuple(tensor.shape) for tensor in tensors]), None
            except ValueError as error:
                return {}, f"shapes that do not fit: {getattr(error, 'expression', error)}"
        sizes: dict[str, int] = {}
        for guard, tensor in zip(self.tensors, tensors, strict=True):
            for axis, size in zip(guard.axes, tensor.shape, strict=False):
                if sizes.setdefault(axis, size) != size:
                    return sizes, "shapes that do not fit together"
        return sizes, None

    def _dtype(self, tensors: tuple[torch.Tensor, ...]) -> str | None:
        for choice in self.dtypes:
            pairs = zip(self.tensors, tensors, strict=True)
            if all(tensor.dtype == choice[guard.dtype] for guard, tensor in pairs):
                return None
        by_symbol = {guard.dtype: _short(t) for guard, t in zip(self.tensors, tensors, strict=True)}
        return f"dtype {'/'.join(by_symbol.values())}"

    def _place(self, tensors: tuple[torch.Tensor, ...]) -> str | None:
        for guard, tensor in zip(self.tensors, tensors, strict=True):
            if reason := guard.misplaced(tensor):
                return reason
        if self.capabilities and self.device == "cuda":
            capability = torch.cuda.get_device_capability(tensors[0].device)
            if capability not in self.capabilities:
                return f"compute capability {capability[0]}.{capability[1]}"
        return None

    def _size(self, sizes: Mapping[str, int]) -> str | None:
        own = [
            (axis, bounds)
            for shape, axis, bounds in self.shapes
            if all(sizes.get(name) == size for name, size in shape.items())
        ]
        judged = {axis for axis, _ in own}
        usual = [(axis, bounds) for axis, bounds in self.axes.items() if axis not in judged]
        for axis, bounds in (*usual, *own):
            reason = _beyond(axis, sizes[axis], bounds) if axis in sizes else None
            if reason is not None:
                return reason
        return None


def dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class has operators of its own, so that its memory, if it has any, is not
    what it stands for: DTensor, nested, fake and functional tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _beyond(axis: str, size: int, bounds: AxisBounds) -> str | None:
    """Why the kernel does not support this size. It names the bound and not the size, so that calls
    of many sizes have one reason.
    """
    if size % bounds.multiple_of:
        return f"{axis} no multiple of {bounds.multiple_of}"
    if size < bounds.minimum:
        return f"{axis} below {bounds.minimum}"
    if bounds.maximum is not None and size > bounds.maximum:
        return f"{axis} above {bounds.maximum}"
    return None


def _bucket(size: int) -> str:
    return str(size) if size <= _EXACT else f"<={1 << (size - 1).bit_length()}"


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
