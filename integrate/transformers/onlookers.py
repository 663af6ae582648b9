"""Find other code that would miss a call, or that holds a tensor which is overwritten later.

Hooks and replaced parts are around a place. What torch itself does with each of its operators is
around a call: it records, transforms or differentiates them, and a kernel is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.modules import module as nn_module

from patcher.integrate.guards import FOREIGN, dispatches_itself
from patcher.integrate.transformers.parts import kind_of, without_patches

Modules = tuple[torch.nn.Module, ...]


class Onlookers:
    """The hooks and replaced parts around one place, as they are at each call.

    Parts are compared by identity at each call, and gathered again if any has changed.
    """

    def __init__(
        self, watched: Callable[[], tuple[Modules, Modules]], *skipped_kinds: type[torch.nn.Module]
    ) -> None:
        """Watch some modules.

        Args:
            watched: returns the modules that are no longer called, and those with a part whose
                output is overwritten later.
            skipped_kinds: the classes that may be no longer called.
        """
        self._watched, self._kinds = watched, skipped_kinds
        self._own = {kind: kind.forward for kind in map(without_patches, skipped_kinds)}
        self.keeps = False
        """Whether a part that is neither torch's nor transformers' may keep an output, so that only
        a copy may be overwritten."""
        self._refusal: str | None = None
        self._hooks: list[dict[int, Any]] = []
        self._given: tuple[Modules, Modules] | None = None
        self._modules: list[torch.nn.Module] = []
        self._types: list[type[Any]] = []
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._childless: list[dict[str, Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._replaced: list[bool] = []
        """Which modules have a forward in their own attributes."""
        self._forwards: dict[type[torch.nn.Module], Any] = {}
        """By class: its forward, which other code may replace."""

    def refusal(self) -> str | None:
        """Why the work must not be done in place; None if it may be."""
        if torch.compiler.is_compiling():
            _look_again(self)
        elif self._changed():
            self.look_again()
        # transformers' own recording hooks do not count
        if any(self._hooks) and any(
            getattr(hook, "__name__", "") != "output_capturing_hook"
            for hooks in self._hooks
            for hook in hooks.values()
        ):
            return "a module has hooks"
        return self._refusal

    def look_again(self) -> None:
        """Gather the modules and what may be observed there."""
        self._given = skipped, roots = self._watched()
        self._modules = [*skipped, *(module for root in roots for module in root.modules())]
        self._types = [type(module) for module in self._modules]
        trees = [module._modules for module in self._modules]
        self._children = [(tree, tuple(tree.values())) for tree in trees if tree]
        self._childless = [tree for tree in trees if not tree]
        self._attributes = [module.__dict__ for module in self._modules]
        self._replaced = ["forward" in attributes for attributes in self._attributes]
        # the dicts are live, so they include hooks registered later
        self._hooks = [
            nn_module._global_forward_hooks,
            nn_module._global_forward_pre_hooks,
            *(module._forward_hooks for module in self._modules),
            *(module._forward_pre_hooks for module in skipped),
        ]
        self._forwards = {kind: kind.forward for kind in map(kind_of, self._modules)}
        self.keeps = any(self._replaced) or not all(map(_is_plain, self._forwards))
        self._refusal = next(
            (
                f"the forward of {kind.__name__} was replaced"
                if kind in self._own
                else f"{kind.__name__} is not {self._kinds[-1].__name__}"
                for module, kind in ((module, kind_of(module)) for module in skipped)
                if self._own.get(kind) is not kind.forward or "forward" in module.__dict__
            ),
            None,
        )

    def _changed(self) -> bool:
        return (
            self._watched() != self._given
            or list(map(type, self._modules)) != self._types
            or any(self._childless)
            or any(tuple(now.values()) != known for now, known in self._children)
            or list(map(contains, self._attributes, repeat("forward"))) != self._replaced
            or any(kind.forward is not was for kind, was in self._forwards.items())
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _look_again(onlookers: Onlookers) -> None:
    onlookers.look_again()


def _is_plain(kind: type[torch.nn.Module]) -> bool:
    """Whether class and forward are of a package whose modules keep no output."""
    places = kind.__module__, str(getattr(kind.forward, "__module__", ""))
    return all(place.startswith(("torch.", "transformers.")) for place in places)


def observer_of(args: Iterable[object]) -> str | None:
    """What of torch would miss a kernel's work in a call with these arguments; None if nothing."""
    if torch.compiler.is_exporting() or _jit_tracing():
        # an exported program stands alone, without the patch's operators
        return "exported or traced"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if _transformed():
        return "a transform of torch.func"
    if any(isinstance(arg, torch.Tensor) and dispatches_itself(arg) for arg in args):
        return FOREIGN
    if torch.compiler.is_compiling():
        return None
    if _symbolic_trace._is_fx_tracing_flag:
        return "exported or traced"
    return "a mode that sees every operator" if torch._C._len_torch_dispatch_stack() else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
