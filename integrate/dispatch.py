"""Choose the kernel of each call: the patched one if its guards hold, else the engine's own.

A served engine imports this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from patcher.integrate.counts import CallCounters, CallSignature, GraphWatch
from patcher.integrate.guards import FOREIGN, CallGuards, dispatches_itself
from patcher.integrate.keys import key_of, matcher_of, never

log = logging.getLogger("patcher")

_MOST_CASES = 10_000
"""Cached call signatures; beyond that number the cache is cleared."""
_MOST_COPIED = 256 << 20
"""Largest tensor in bytes that is copied before a first call."""

View = Callable[..., tuple[Any, ...]]
"""Gives a contract's arguments from those of an operator, which may be other views of tensors."""


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

    eager_only = False
    """Whether a transformers model's compiled code is left to itself: there our arithmetic would
    stand for the engine's own, which a recorder is for."""

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
        self._last = CallSignature("", None)
        """Signature of the last call. What followed it before is tried first: layers call with the
        same signatures in the same order. Threads may share it, since each call is tested."""
        self._ops: dict[tuple[Callable[..., object], View | None], tuple[Any, Any]] = {}
        """By the engine's own function and the view: the library that holds the operator, and the
        operator."""
        self._grad_enabled = torch.is_grad_enabled
        self._never_in_graphs = not guards.graph_safe

    def __call__(self, *args: Any) -> bool:
        """Run the kernel in place and return True, or change nothing and return False."""
        # this path runs several times per layer and token, so it avoids every needless call
        case = self._last.next
        if not case.matches(*args):
            case = self._find(args)
        self._last = case
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

    def left(self, *written: Any) -> None:
        """Take note of what the engine's own code gave for the call that was refused last; a
        recorder does, see `patcher.integrate.recording`.

        Args:
            written: the tensors that the contract says are written, in its order; none: the
                engine's code wrote into those that the call was given.
        """

    def warm(self, *args: Any) -> None:
        """Build and prove the kernel for such a call on scratch tensors, without counting it.

        Raises:
            RuntimeError: the guards refuse the call. With `strict`, the kernel's own error.
        """
        before = self.book.reasons.copy()
        ran = self(*args)
        reasons = self.book.uncount(before)
        if not ran:
            raise RuntimeError(f"{self.name} cannot be warmed: {', '.join(reasons)}")
        self._known[self._key(*args)].calls -= 1

    def op(self, original: Callable[..., object], view: View | None = None) -> Callable[..., None]:
        """The dispatcher as a torch operator, which torch.compile does not decompose.

        The operator's name contains the patch's digest, so that compiled code is tied to the patch.
        Further operators of one patch (of a second model or arm, or with another `original`) get a
        number appended.

        Args:
            original: the engine's own function, which also works in place; it runs if the patched
                kernel does not. Each has an operator of its own.
            view: gives the contract's arguments from the operator's, which `original` is given;
                by default they are the same.
        """
        if (original, view) not in self._ops:
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
                if this is None:
                    original(*args)
                elif not this(*(args if view is None else view(*args))):
                    original(*args)
                    this.left()

            library.impl(name, run, "CompositeExplicitAutograd")
            library.impl(name, _nothing, "Meta")
            self._ops[original, view] = library, getattr(torch.ops.patcher, name).default
        operator: Callable[..., None] = self._ops[original, view][1]
        return operator

    def close(self) -> None:
        """Unregister the operators; code compiled with them can no longer run."""
        for library, _ in self._ops.values():
            library._destroy()
        self._ops = {}

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
            _alike(arg)
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
        """The signature of a call, which is expected to follow the last one from now on."""
        if any(map(dispatches_itself, args[: len(self.guards.tensors)])):
            # its key may not be asked for: it may have no memory
            return CallSignature("", FOREIGN)
        key = self._key(*args)
        case = self._known.get(key) or self._check(key, args)
        self._last.next = case
        return case

    def _check(self, key: tuple[object, ...], args: tuple[Any, ...]) -> CallSignature:
        """Check the guards of a new signature."""
        refusal = self.guards.refusal(args)
        tensors = args[: len(self.guards.tensors)]
        label = self.name if refusal else f"{self.name} {self.guards.label(tensors)}"
        if len(self._known) >= _MOST_CASES and not self._capturing():
            for former in self._known.values():
                former.matches = never  # so that no call is counted in what is forgotten
            self._known.clear()
            self.book.forget_cases()
        case = self._known[key] = CallSignature(
            label, refusal, self._matcher(*args), device=_one_of_several(tensors)
        )
        if refusal is None:
            self.book.cases.append(case)
        return case


def _one_of_several(tensors: tuple[torch.Tensor, ...]) -> int | None:
    """Index of the CUDA device of a call; None where no other could be the current one."""
    device = tensors[0].device
    return device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which `clone` keeps for dense tensors alone. So the first call
    is of the kernel that later calls run; what lies between far rows is not worth the memory.
    """
    shape, strides = tensor.shape, tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last * tensor.element_size() >= _MOST_COPIED:
        return tensor.clone()
    return tensor.new_empty_strided(shape, strides).copy_(tensor)


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
