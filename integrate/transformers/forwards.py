"""What every patch point of this engine does: forwards put on instances, and taken off again.

A point is for a model that is built (`target`), or for those that are built from now on (`None`):
then the constructor hands each new model over; see `patcher.integrate.transformers.later`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as nn_module

from patcher.bench import UsageError, VerificationError
from patcher.integrate.counts import CallCounters
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.transformers.later import ModelsBuiltLater
from patcher.integrate.transformers.parts import body_of

Forward = Callable[..., Any]
Swap = tuple[torch.nn.Module, Forward]


class GptOssPoint(ABC):
    """A patch point in transformers' gpt-oss; its subclasses say what is replaced by what."""

    engine: ClassVar[str] = "transformers"
    name: ClassVar[str]
    op: ClassVar[str]

    def __init__(self, target: Any = None) -> None:
        """Get ready for this model, or for those built later; nothing is changed yet."""
        self.target = target
        self._later: ModelsBuiltLater | None = None
        self._swaps: list[Swap] = []
        """What is in."""
        self._made: tuple[Dispatcher, list[torch.nn.Module], list[Swap]] | None = None
        """What was in last, and for which parts: put in again, compiled code still fits."""

    @classmethod
    @abstractmethod
    def fingerprint(cls) -> str: ...

    @abstractmethod
    def parts(self, body: Any) -> list[torch.nn.Module]:
        """The instances whose work is taken over.

        Raises:
            VerificationError: they are not what the patch replaces.
        """

    @abstractmethod
    def swaps(self, body: Any, kernel: Dispatcher) -> Iterator[Swap]:
        """Instances and their new forwards."""

    def find(self) -> str:
        """Where it is: how many instances, or the models that are built later.

        Raises:
            VerificationError: not a gpt-oss of transformers, or already patched by someone.
        """
        if self.target is None:
            return ModelsBuiltLater.find()
        parts = self._parts()
        return f"{len(parts)} instances in {type(self.target).__name__}"

    def install(self, kernel: Dispatcher) -> None:
        """Swap the forwards of this model's instances; cheap, so that arms can take turns.

        Raises:
            UsageError: installed already.
            VerificationError: someone else has patched the model meanwhile.
        """
        if self._swaps or self._later is not None:
            raise UsageError("the patch is installed already", "remove it first")
        if self.target is None:
            later = ModelsBuiltLater(type(self), kernel)
            later.install()
            self._later = later
            return
        parts, made = self._parts(), self._made
        if made is None or made[0] is not kernel or made[1] != parts:
            swaps = self.swaps(body_of(self.target), kernel)
            bound = [(module, _bound(module, forward, self)) for module, forward in swaps]
            made = self._made = kernel, parts, bound
        self._swaps = made[2]
        for module, forward in self._swaps:
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Put everything back; once more is the same as once.

        Raises:
            VerificationError: someone put a forward of their own over ours; ours are out, theirs
                stays.
        """
        later, self._later = self._later, None
        if later is not None:
            later.remove()
        swaps, self._swaps = self._swaps, []
        covered = []
        for module, forward in swaps:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
            else:
                covered.append(type(module).__name__)
        if covered:
            raise VerificationError(
                f"{covered[0]} was patched by other code while this patch was applied",
                "remove the patches in the reverse order; load the model again",
            )

    def _parts(self) -> list[torch.nn.Module]:
        parts = self.parts(body_of(self.target))
        for module in parts:
            if "forward" in module.__dict__:
                raise VerificationError(
                    f"{type(module).__name__} is patched already", "remove the other patch first"
                )
        return parts


def _bound(module: Any, forward: Forward, point: GptOssPoint) -> Forward:
    """A method of one instance: its copies, and what is unpickled of it, run transformers' own."""
    own = type(module).forward

    @functools.wraps(own)
    def method(instance: Any, *args: Any, **more: Any) -> Any:
        if instance is not module:
            return own(instance, *args, **more)
        return forward(*args, **more)

    method.patch_point = point  # type: ignore[attr-defined]  # lives as long as the model
    return MethodType(method, module)


class Onlookers:
    """The hooks that would miss a call, or be handed a tensor that is written to later."""

    def __init__(
        self, skipped: Iterable[torch.nn.Module], seen: Iterable[torch.nn.Module] = ()
    ) -> None:
        """`skipped` are not called any more; what `seen` give is written to later."""
        called_past = list(skipped)
        # the dicts are live: a hook registered later is in them
        self._hooks: list[dict[int, Any]] = [
            nn_module._global_forward_hooks,
            nn_module._global_forward_pre_hooks,
            *(module._forward_hooks for module in (*called_past, *seen)),
            *(module._forward_pre_hooks for module in called_past),
        ]

    def look(self) -> bool:
        """Whether anybody looks on; transformers' own hooks do so only while it records."""
        return any(self._hooks) and any(
            getattr(hook, "__name__", "") != "output_capturing_hook"
            for hooks in self._hooks
            for hook in hooks.values()
        )


class ForwardPatch:
    """One place from which a kernel is called: eagerly, or as an operator in compiled code."""

    def __init__(self, kernel: Dispatcher, original: Callable[..., object]) -> None:
        """`original` works in place as the kernel does; compiled code has both in one operator."""
        self._kernel, self._operator = kernel, kernel.op(original)

    def __call__(self, *args: Any) -> bool:
        """Whether the work was done in place, by whichever kernel."""
        if torch.compiler.is_compiling():
            self._operator(*args)
            return True
        return self._kernel(*args)

    def refuse(self, reason: str, calls: int = 1) -> None:
        """Count calls that are not dispatched: in compiled code once, when it is made."""
        if torch.compiler.is_compiling():
            reason = f"{reason}, when it was compiled"
        _count(self._kernel.book, reason, calls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count(book: CallCounters, reason: str, calls: int) -> None:
    book.reasons[reason] += calls
