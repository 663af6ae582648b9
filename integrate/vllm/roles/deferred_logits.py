"""Logits that are not computed before something reads them.

The head and the sampler of an engine are far apart, and much may read the logits between them. A
`DeferredLogits` stands for them on the way: a sampler that wants the largest alone has the kernel
of a patch choose it from what the head was given. Whatever else asks it for anything, a shape or
an address as well, computes the logits by the engine's own code first and works on these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map


class DeferredLogits(torch.Tensor):
    """Stands for the logits of a step; it has no memory of its own, so that code which asks for it
    past PyTorch's functions fails, and does not read other numbers."""

    hidden: torch.Tensor
    """What the head was given, [tokens, hidden]."""
    weight: torch.Tensor
    """The head's rows that are tokens, [vocab, hidden]."""
    _compute: Callable[[], torch.Tensor]
    _on_read: Callable[[], None]
    _computed: torch.Tensor | None

    @staticmethod
    def of(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        compute: Callable[[], torch.Tensor],
        on_read: Callable[[], None],
    ) -> DeferredLogits:
        """Make one.

        Args:
            hidden: see above.
            weight: see above.
            compute: the engine's own head; called once at most.
            on_read: called when something reads the logits without being asked by `compute`.
        """
        made = torch.Tensor._make_subclass(DeferredLogits, torch.empty(0, device="meta"))
        assert isinstance(made, DeferredLogits)
        made.hidden, made.weight, made._compute, made._on_read = hidden, weight, compute, on_read
        made._computed = None
        return made

    @property
    def untouched(self) -> bool:
        """Whether nothing has read them, and so nothing has changed them."""
        return self._computed is None

    def compute(self) -> torch.Tensor:
        """The logits: computed now, or those that were, with what was written to them since."""
        if self._computed is None:
            self._computed = self._compute()
        return self._computed

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*tree_map(_read, args), **tree_map(_read, dict(kwargs or {})))


def _read(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    if value.untouched:
        value._on_read()
    return value.compute()
