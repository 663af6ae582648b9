"""Choose the kernel of each call: the patched one if its guards hold, else the engine's own.

A served engine imports this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from patcher.integrate.counts import CallCounters, CallSignature, GraphWatch
from patcher.integrate.keys import key_of, matcher_of, never

log = logging.getLogger("patcher")

_MOST_CASES = 10_000
"""Cached call signatures; beyond that number the cache is cleared."""
_MOST_COPIED = 256 << 20
"""Largest tensor in bytes that is copied before a first call."""
_EXACT = 128
"""Receipts list row counts up to this exactly, larger ones by the next power of two."""


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
    capabilities: tuple[tuple[int, int], ...] = ()
    """Supported compute capabilities; empty for any."""
    graph_safe: bool = True
    """Whether the kernel may be recorded in a CUDA graph."""
    solve: Callable[[list[tuple[int, ...]]], Mapping[str, int]] | None = None
    """Computes axis sizes from the shapes of the tensors, if the contract's axes are arithmetic.
    It raises ValueError if the shapes do not fit."""

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
                return {}, f"shapes that do not fit: {error}"
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
        for axis, guard in self.axes.items():
            size = sizes.get(axis, guard.minimum)
            if size % guard.multiple_of:
                return f"{axis} {size} is no multiple of {guard.multiple_of}"
            if size < guard.minimum:
                return f"{axis} {size} is under {guard.minimum}"
            if guard.maximum is not None and size > guard.maximum:
                return f"{axis} {size} is over {guard.maximum}"
        return None


class Dispatcher:
    """Calls the patched kernel with a contract's tensors and scalars, or counts why it does not.

    With `strict` (measuring), a kernel that raises on an allowed call is an error.

    Otherwise (serving), the first call of each signature works on copies. If the kernel raises
    there, the caller's tensors are intact: this call and all later ones fall back, and the error is
    logged once. If the kernel raises later, the caller's tensors may be corrupt: that call raises,
    and all later ones fall back. Tensors that are written in part, such as a KV cache, are not
    copied, since others may write the rest meanwhile; the original writes the same part again.
    Neither are tensors over 256 MiB.

    The kernel runs with the device of its tensors as the current one, as torch's operators do.

    While a CUDA graph is recorded, nothing is built, copied or allocated: signatures that were not
    proven before fall back.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., object],
        guards: CallGuards,
        book: CallCounters,
        *,
        strict: bool = True,
        watch: GraphWatch | None = None,
    ) -> None:
        """Set up the dispatcher.

        Args:
            name: the op's name.
            kernel: the patched kernel; it works in place.
            guards: the calls that it supports.
            book: the counters of its calls and fallbacks.
            strict: whether a kernel that raises is an error.
            watch: knows whether a CUDA graph is being recorded.
        """
        self.name, self.guards, self.book, self.strict = name, guards, book, strict
        self._kernel, self._watch = kernel, watch
        self._known: dict[tuple[object, ...], CallSignature] = {}
        self._broken: str | None = None
        self._key = key_of(len(guards.tensors))
        self._matcher = matcher_of(len(guards.tensors))
        self._last: tuple[Callable[..., bool], CallSignature] = never, CallSignature("", None)
        """Test and signature of the last call, since most calls repeat the one before. It is one
        attribute, since threads may share a dispatcher."""
        self._op: Any = None
        self._library: Any = None
        self._grad_enabled = torch.is_grad_enabled
        self._never_in_graphs = not guards.graph_safe

    def __call__(self, *args: Any) -> bool:
        """Run the kernel in place and return True, or change nothing and return False."""
        # this path runs several times per layer and token, so it avoids every needless call
        matches, case = self._last
        if not matches(*args):
            case = self._find(args)
        refusal = case.refusal or self._broken
        if refusal is None:
            if self._grad_enabled():
                refusal = "gradients are on"
            elif self._never_in_graphs and self._capturing():
                refusal = "not safe in a graph"
        if refusal is not None:
            self.book.reasons[refusal] += 1
            return False
        if self.strict or case.proven:
            try:
                if case.device is None:
                    self._kernel(*args)
                else:
                    self._launch(case.device, args)
            except Exception as error:
                if not self.strict:
                    self._break(error)
                raise
        elif not self._prove(case, args):
            return False
        case.calls += 1
        return True

    def warm(self, *args: Any) -> None:
        """Build and prove the kernel for such a call on scratch tensors, without counting it.

        Raises:
            RuntimeError: the guards refuse the call. With `strict`, the kernel's own error.
        """
        before = self.book.reasons.copy()
        ran = self(*args)
        self.book.reasons, reasons = before, self.book.reasons - before
        if not ran:
            raise RuntimeError(f"{self.name} cannot be warmed: {', '.join(reasons)}")
        self._known[self._key(*args)].calls -= 1

    def op(self, original: Callable[..., object]) -> Callable[..., None]:
        """The dispatcher as a torch operator, which torch.compile does not decompose.

        The operator's name contains the patch's digest, so that compiled code is tied to the patch.
        Further dispatchers of one patch (a second model or arm) get a number appended.

        Args:
            original: the engine's own function, which also works in place; it runs if the patched
                kernel does not.
        """
        if self._op is None:
            name = base = f"{self.name}_{self.book.digest[:12]}"
            others = 0
            while hasattr(torch.ops.patcher, name):
                others += 1
                name = f"{base}_{others}"
            library: Any = torch.library.Library("patcher", "FRAGMENT")  # type: ignore[no-untyped-call]
            schema = f"{name}{_schema(self.guards)}"
            library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))

            # torch holds `run` as long as the library, and the library as long as the dispatcher
            dispatcher = weakref.ref(self)

            def run(*args: Any) -> None:
                this = dispatcher()
                if this is None or not this(*args):
                    original(*args)

            library.impl(name, run, "CompositeExplicitAutograd")
            library.impl(name, _nothing, "Meta")
            self._library, self._op = library, getattr(torch.ops.patcher, name).default
        operator: Callable[..., None] = self._op
        return operator

    def close(self) -> None:
        """Unregister the operator; code compiled with it can no longer run."""
        if self._library is not None:
            self._library._destroy()
            self._library = self._op = None

    def _prove(self, case: CallSignature, args: tuple[Any, ...]) -> bool:
        """Run a first call in serving on copies, so that a request survives a kernel that raises.

        Returns:
            Whether the kernel ran; if not, the call falls back.
        """
        if self._capturing():
            self.book.reasons["not warmed before the graph was recorded"] += 1
            return False
        tensors = len(self.guards.tensors)
        copied = [
            arg.clone()
            if guard.mutated and not guard.in_part and arg.nbytes <= _MOST_COPIED
            else arg
            for guard, arg in zip(self.guards.tensors, args[:tensors], strict=True)
        ]
        copied += args[tensors:]
        try:
            self._launch(case.device, copied)
        except Exception as error:
            self._break(error)
            return False
        for arg, copy in zip(args, copied, strict=True):
            if copy is not arg:
                arg.copy_(copy)
        case.proven = True
        return True

    def _launch(self, device: int | None, args: Sequence[Any]) -> None:
        if device is None or device == torch.cuda.current_device():
            self._kernel(*args)
        else:
            with torch.cuda.device(device):
                self._kernel(*args)

    def _break(self, error: Exception) -> None:
        self._broken = f"the patched kernel raised {type(error).__name__}"
        log.exception("%s: the engine's own kernel runs from now on", self._broken)
        self.book.reasons[self._broken] += 1

    def _capturing(self) -> bool:
        return self._watch is not None and self._watch.capturing

    def _find(self, args: tuple[Any, ...]) -> CallSignature:
        key = self._key(*args)
        case = self._known.get(key) or self._check(key, args)
        if case.matches is None:
            case.matches = self._matcher(*args)
        self._last = case.matches, case
        return case

    def _check(self, key: tuple[object, ...], args: tuple[Any, ...]) -> CallSignature:
        """Check the guards of a new signature."""
        refusal = self.guards.refusal(args)
        tensors = args[: len(self.guards.tensors)]
        label = self.name if refusal else f"{self.name} {self.guards.label(tensors)}"
        if len(self._known) >= _MOST_CASES:
            self._known.clear()
        case = self._known[key] = CallSignature(label, refusal, device=_one_of_several(tensors))
        if refusal is None:
            self.book.cases.append(case)
        return case


def _one_of_several(tensors: tuple[torch.Tensor, ...]) -> int | None:
    """Index of the CUDA device of a call; None where no other could be the current one."""
    device = tensors[0].device
    return device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None


def _schema(guards: CallGuards) -> str:
    """`(Tensor(a0!) input, Tensor weight, float epsilon) -> ()`."""
    tensors = [
        f"Tensor(a{index}!) {guard.name}" if guard.mutated else f"Tensor {guard.name}"
        for index, guard in enumerate(guards.tensors)
    ]
    scalars = [f"{'SymInt' if kind is int else 'float'} {name}" for name, kind in guards.scalars]
    return f"({', '.join([*tensors, *scalars])}) -> ()"


def _nothing(*args: Any) -> None:
    """The operator on fake tensors: it returns nothing and changes no shape."""


def _bucket(size: int) -> str:
    return str(size) if size <= _EXACT else f"<={1 << (size - 1).bit_length()}"


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
