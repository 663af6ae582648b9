"""The common part of this engine's patch points: replace forwards of modules and restore them.

A point patches one existing model (`target`), or with `None` every model built afterwards; see
`patcher.integrate.transformers.later`. Models change after a patch was installed: quantisers,
adapters and people replace parts. So forwards look up the parts at each call, and the body's
forward counts the parts that were not called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.bench import UsageError, VerificationError
from patcher.integrate.counts import CallCounters
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import FOREIGN, dispatches_itself
from patcher.integrate.transformers.later import ModelsBuiltLater
from patcher.integrate.transformers.parts import body_of, kind_of, refuse_replaced
from patcher.integrate.transformers.swap import Forward, ModuleSwap

NewForward = tuple[torch.nn.Module, Callable[[Forward], Forward]]
"""A module, and the function that makes its new forward from its own one."""


def why_not_now(x: torch.Tensor) -> str | None:
    """Why no call with this input may be of a kernel; None if one may."""
    if torch.is_grad_enabled():
        return "gradients are on"
    return "autocast is on" if torch.is_autocast_enabled(x.device.type) else None


class ForwardPatch:
    """One place from which a kernel is called: eagerly, or as an operator in compiled code."""

    def __init__(self, kernel: Dispatcher, original: Callable[..., object]) -> None:
        """Register the kernel and `original`, which also works in place, as one operator."""
        self._kernel, self._operator = kernel, kernel.op(original)
        self.reached = 0
        """Eager calls of the kernel and refusals."""
        self.compiled = False
        """Whether some calls are in compiled code, where they are not in `reached`."""

    def __call__(self, *args: Any) -> bool:
        """Call the kernel; return whether the work was done in place, by either kernel."""
        if torch.compiler.is_compiling():
            if any(isinstance(arg, torch.Tensor) and dispatches_itself(arg) for arg in args):
                self.refuse(FOREIGN)
                return False
            if self._kernel.eager_only:
                self.refuse("recorded in eager code alone")
                return False
            _mark(self)
            self._operator(*args)
            return True
        self.reached += 1
        return self._kernel(*args)

    def left(self, *written: torch.Tensor) -> None:
        """See `Dispatcher.left`; in compiled code nothing is noted."""
        if not torch.compiler.is_compiling():
            self._kernel.left(*written)

    def refuse(self, reason: str, calls: int = 1) -> None:
        """Count calls that are not dispatched; compiled code counts them once, during tracing."""
        if torch.compiler.is_compiling():
            reason = f"{reason}, when it was compiled"
            _mark(self)
        else:
            self.reached += calls
        _count(self._kernel.book, reason, calls)


class ForwardsPoint(ABC):
    """A patch point that replaces forwards of a built model's modules."""

    engine: ClassVar[str] = "transformers"
    name: ClassVar[str]
    op: ClassVar[str]

    def __init__(self, target: Any = None) -> None:
        """Prepare to patch this model, or with None later models; nothing changes yet."""
        self.target = target
        self._later: ModelsBuiltLater | None = None
        self._swaps: list[ModuleSwap] = []
        """The installed forwards."""
        self._last: tuple[Dispatcher, list[torch.nn.Module], list[ModuleSwap]] | None = None
        """The forwards installed last and their modules; reusing them keeps compiled code valid."""

    @classmethod
    @abstractmethod
    def fingerprint(cls) -> str: ...

    @staticmethod
    @abstractmethod
    def original(*args: Any) -> None:
        """The engine's own arithmetic in place of the kernel's, also in place."""

    @abstractmethod
    def _parts(self) -> list[torch.nn.Module]:
        """The modules to patch.

        Raises:
            VerificationError: there are none, or they are not what the patch replaces.
        """

    @abstractmethod
    def _swaps_for(self, kernel: Dispatcher) -> list[ModuleSwap]:
        """The modules with their new forwards."""

    def find(self) -> str:
        """A description of the target: the number of modules, or later models.

        Raises:
            VerificationError: the model has no such modules, or is already patched.
        """
        if self.target is None:
            return ModelsBuiltLater.find()
        parts = self._parts()
        return f"{len(parts)} instances in {type(self.target).__name__}"

    def install(self, kernel: Dispatcher) -> None:
        """Replace the forwards of the modules; this is cheap, so that arms can alternate.

        Raises:
            UsageError: the patch is already installed.
            VerificationError: other code has patched the model in the meantime.
        """
        if self._swaps or self._later is not None:
            raise UsageError("the patch is already installed", "remove it first")
        if self.target is None:
            later = ModelsBuiltLater(type(self), kernel)
            later.install()
            self._later = later
            return
        parts, last = self._parts(), self._last
        if last is None or last[0] is not kernel or last[1] != parts:
            last = self._last = kernel, parts, self._swaps_for(kernel)
        self._swaps = last[2]
        for swap in self._swaps:
            swap.put_in()

    def remove(self) -> None:
        """Restore all forwards; idempotent. Afterwards nothing calls the kernel, whoever holds it.

        Raises:
            VerificationError: other code has replaced one of these forwards; that code stays.
        """
        later, self._later = self._later, None
        if later is not None:
            later.remove()
        swaps, self._swaps = self._swaps, []
        covered = [name for name in [swap.take_out() for swap in swaps] if name is not None]
        if covered:
            raise VerificationError(
                f"{covered[0]} was replaced by other code while this patch was installed: the "
                "patch is out, the other code stays",
                "remove patches in reverse order; load the model again",
            )


class GptOssPoint(ForwardsPoint):
    """A patch point in transformers' gpt-oss; subclasses define the modules and their forwards."""

    within: ClassVar[tuple[str, ...]]
    """The path from a decoder layer to the module that calls the kernel."""
    calls_per_layer: ClassVar[int] = 1

    @abstractmethod
    def parts(self, body: Any) -> list[torch.nn.Module]:
        """The modules to patch.

        Raises:
            VerificationError: they are not what the patch replaces.
        """

    @abstractmethod
    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        """The modules, without the body, with their new forwards."""

    def run(self, body: Any, original: Forward, *args: Any, **more: Any) -> Any:
        """Run the body's own forward."""
        return original(*args, **more)

    def _parts(self) -> list[torch.nn.Module]:
        body = body_of(self.target)
        parts = self.parts(body)
        for module in (*parts, body):
            # patches of other points may lie over the body's forward
            refuse_replaced(module)
            if module is not body and type(module) is not kind_of(module):
                raise VerificationError(
                    f"{kind_of(module).__name__} is already patched", "remove the other patch first"
                )
        return parts

    def _swaps_for(self, kernel: Dispatcher) -> list[ModuleSwap]:
        body, seam = body_of(self.target), ForwardPatch(kernel, self.original)
        refuse = partial(seam.refuse, calls=self.calls_per_layer)
        swaps = [
            ModuleSwap(part, make, self, _ignore if part is body.norm else refuse)
            for part, make in self.forwards(body, seam)
        ]
        return [*swaps, ModuleSwap(body, partial(self._body_forward, body, seam), self, _ignore)]

    def _body_forward(self, body: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """The body's own forward, after which the layers that the patch missed are counted."""

        def forward(*args: Any, **more: Any) -> Any:
            if torch.compiler.is_compiling():
                result = self.run(body, original, *args, **more)
                _count_missed(self, body, seam)
                return result
            before = seam.reached
            result = self.run(body, original, *args, **more)
            missed = len(body.layers) * self.calls_per_layer - (seam.reached - before)
            if missed > 0 and not seam.compiled:
                seam.refuse(next(self._why_missed(body), "a layer was not called"), missed)
            return result

        return forward

    def _why_missed(self, body: Any) -> Iterator[str]:
        """For each layer in which the patch cannot run: what is in the place of its part."""
        for layer in body.layers:
            module, name = layer, "layer"
            for step in (*self.within, None):
                kind = kind_of(module)
                if not kind.__module__.endswith(".modeling_gpt_oss"):
                    yield f"{name} is {kind.__name__}"
                    break
                if "forward" in module.__dict__:
                    yield f"the forward of {name} was replaced"
                    break
                if step is None:
                    if type(module) is kind:
                        yield f"{name} was replaced"
                    break
                module, name = getattr(module, step), step


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count(book: CallCounters, reason: str, calls: int) -> None:
    book.reasons[reason] += calls


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _mark(seam: ForwardPatch) -> None:
    seam.compiled = True


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count_missed(point: GptOssPoint, body: Any, seam: ForwardPatch) -> None:
    for reason in point._why_missed(body):
        _count(seam._kernel.book, f"{reason}, when it was compiled", point.calls_per_layer)


def _ignore(reason: str) -> None:
    """The body and its last norm: the layers count their calls."""
