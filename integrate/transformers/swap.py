"""Replace the forward of one module by giving it a subclass of its class.

A forward in the module's `__dict__` would be shared with shallow copies and replicas
(`copy.copy`, `torch.nn.DataParallel`) and would run with the original's weights there. It would
also be held by a wrapper (accelerate's hooks, kernels of the hub) after the patch was removed. A
method of a class gets the module that is called, and torch.compile checks the class at each call.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch

from patcher.integrate.transformers.onlookers import observer_of
from patcher.integrate.transformers.parts import kind_of, without_patches

Forward = Callable[..., Any]


class ModuleSwap:
    """One module and its new forward. Several swaps of a module may lie over each other."""

    def __init__(
        self,
        module: Any,
        make: Callable[[Forward], Forward],
        point: object,
        refuse: Callable[[str], None],
    ) -> None:
        """Prepare the swap; nothing changes yet.

        Args:
            module: the module.
            make: returns the new forward, given the module's own one.
            point: the patch point, which lives as long as the swap.
            refuse: counts a call of a copy of the module, which runs the copy's own forward.
        """
        self.module, self._make, self._point, self._refuse = module, make, point, refuse
        self._own = kind_of(module)
        self._kinds: dict[type[Any], type[Any]] = {}
        """Subclasses by the class that they replace; reusing them keeps compiled code valid."""

    def put_in(self) -> None:
        """Give the module the subclass with the new forward."""
        base = type(self.module)
        kind = self._kinds.get(base)
        if kind is None:
            kind = self._kinds[base] = self._subclass(base)
        kind.patch_state.active = True
        self.module.__class__ = kind

    def take_out(self) -> str | None:
        """Restore the class; idempotent.

        If other code lies over the subclass, that code stays, and what it calls is the module's own
        forward from now on.

        Returns:
            What other code has replaced; None if there is nothing.
        """
        for made in self._kinds.values():
            made.patch_state.active = False
        kind: Any = type(self.module)
        while "patch_point" in vars(kind) and not kind.patch_state.active:
            kind = kind.__base__
        if kind is not type(self.module):
            self.module.__class__ = kind
        if "forward" in self.module.__dict__:
            return f"{self._own.__name__}.forward"
        return None if kind_of(self.module) is self._own else self._own.__name__

    def _subclass(self, base: Any) -> type[Any]:
        own, module, refuse, state = base.forward, self.module, self._refuse, _State()
        kind, known = self._own, self._own.forward
        ours = self._make(functools.partial(own, module))

        @functools.wraps(own)
        def forward(instance: Any, *args: Any, **more: Any) -> Any:
            if not state.active:
                return base.forward(instance, *args, **more)
            copied = "a copy of a patched module" if instance is not module else None
            reason = copied or observer_of((*args, *more.values()))
            if reason is None and _has_another(kind, known):
                reason = f"the forward of {kind.__name__} was replaced"
            if reason is None:
                return ours(*args, **more)
            refuse(reason)
            return base.forward(instance, *args, **more)

        def __reduce_ex__(instance: Any, protocol: Any) -> Any:
            # copies and pickles are of the class without patches
            create, (kind, *more), *rest = base.__reduce_ex__(instance, protocol)
            if create is copyreg.__newobj__:  # type: ignore[attr-defined]  # checks the class
                create = object.__new__
            return create, (without_patches(kind), *more), *rest

        made: type[Any] = type(base)(
            base.__name__,
            (base,),
            {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
                "__reduce_ex__": __reduce_ex__,
                "forward": forward,
                "patch_point": self._point,
                "patch_state": state,
            },
        )
        return made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_another(kind: Any, known: Forward) -> bool:
    """Whether other code has given a class another forward than the one that was patched."""
    return kind.forward is not known


class _State:
    """Whether one subclass is in use; wrappers and copies may hold one that is not."""

    active = False
