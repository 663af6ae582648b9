"""The common part of this engine's patch points: replace forwards of modules and restore them.

A point patches one existing model (`target`), or with `None` every model built afterwards; see
`patcher.integrate.transformers.later`.
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
    """A patch point in transformers' gpt-oss; subclasses define the modules and their forwards."""

    engine: ClassVar[str] = "transformers"
    name: ClassVar[str]
    op: ClassVar[str]

    def __init__(self, target: Any = None) -> None:
        """Prepare to patch this model, or with None later models; nothing changes yet."""
        self.target = target
        self._later: ModelsBuiltLater | None = None
        self._swaps: list[Swap] = []
        """The installed forwards."""
        self._last: tuple[Dispatcher, list[torch.nn.Module], list[Swap]] | None = None
        """The forwards installed last and their modules; reusing them keeps compiled code valid."""

    @classmethod
    @abstractmethod
    def fingerprint(cls) -> str: ...

    @abstractmethod
    def parts(self, body: Any) -> list[torch.nn.Module]:
        """The modules to patch.

        Raises:
            VerificationError: they are not what the patch replaces.
        """

    @abstractmethod
    def swaps(self, body: Any, kernel: Dispatcher) -> Iterator[Swap]:
        """The modules with their new forwards."""

    def find(self) -> str:
        """A description of the target: the number of modules, or later models.

        Raises:
            VerificationError: the model is not a gpt-oss of transformers, or is already patched.
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
            swaps = self.swaps(body_of(self.target), kernel)
            bound = [(module, _bound(module, forward, self)) for module, forward in swaps]
            last = self._last = kernel, parts, bound
        self._swaps = last[2]
        for module, forward in self._swaps:
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Restore all forwards; idempotent.

        Raises:
            VerificationError: other code replaced one of these forwards; it stays, the others are
                restored.
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
                f"{covered[0]} was patched by other code while this patch was installed",
                "remove patches in reverse order; load the model again",
            )

    def _parts(self) -> list[torch.nn.Module]:
        parts = self.parts(body_of(self.target))
        for module in parts:
            if "forward" in module.__dict__:
                raise VerificationError(
                    f"{type(module).__name__} is already patched", "remove the other patch first"
                )
        return parts


def _bound(module: Any, forward: Forward, point: GptOssPoint) -> Forward:
    """A method of one module; copies and unpickled instances run transformers' own forward."""
    own = type(module).forward

    @functools.wraps(own)
    def method(instance: Any, *args: Any, **more: Any) -> Any:
        if instance is not module:
            return own(instance, *args, **more)
        return forward(*args, **more)

    method.patch_point = point  # type: ignore[attr-defined]  # lives as long as the model
    return MethodType(method, module)


class Onlookers:
    """The hooks that would miss a call, or receive a tensor that is overwritten later."""

    def __init__(
        self, skipped: Iterable[torch.nn.Module], seen: Iterable[torch.nn.Module] = ()
    ) -> None:
        """Watch hooks.

        Args:
            skipped: modules that are no longer called.
            seen: modules whose outputs are overwritten later.
        """
        called_past = list(skipped)
        # the dicts are live, so they include hooks registered later
        self._hooks: list[dict[int, Any]] = [
            nn_module._global_forward_hooks,
            nn_module._global_forward_pre_hooks,
            *(module._forward_hooks for module in (*called_past, *seen)),
            *(module._forward_pre_hooks for module in called_past),
        ]

    def look(self) -> bool:
        """Whether there is any hook; transformers' own recording hooks do not count."""
        return any(self._hooks) and any(
            getattr(hook, "__name__", "") != "output_capturing_hook"
            for hooks in self._hooks
            for hook in hooks.values()
        )


class ForwardPatch:
    """One place from which a kernel is called: eagerly, or as an operator in compiled code."""

    def __init__(self, kernel: Dispatcher, original: Callable[..., object]) -> None:
        """Register the kernel and `original`, which also works in place, as one operator."""
        self._kernel, self._operator = kernel, kernel.op(original)

    def __call__(self, *args: Any) -> bool:
        """Call the kernel; return whether the work was done in place, by either kernel."""
        if torch.compiler.is_compiling():
            self._operator(*args)
            return True
        return self._kernel(*args)

    def refuse(self, reason: str, calls: int = 1) -> None:
        """Count calls that are not dispatched; compiled code counts them once, during tracing."""
        if torch.compiler.is_compiling():
            reason = f"{reason}, when it was compiled"
        _count(self._kernel.book, reason, calls)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _count(book: CallCounters, reason: str, calls: int) -> None:
    book.reasons[reason] += calls
