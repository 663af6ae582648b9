"""How often each expert of a model of transformers is selected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def selections(layers: list[torch.nn.Module], tokens: int) -> Iterator[list[torch.Tensor]]:
    """Count how often each layer selects each of its experts.

    Args:
        layers: modules that hold the experts of a layer, and are called with the indices of those
            that each token goes to.
        tokens: only calls with so many tokens count: one of each sequence in decode.

    Yields:
        Of each layer, float32 of shape [experts] on the CPU.
    """
    counts = [torch.zeros(int(layer.num_experts)) for layer in layers]  # type: ignore[arg-type]
    handles = [
        layer.register_forward_pre_hook(_counting(count, tokens), with_kwargs=True)
        for layer, count in zip(layers, counts, strict=True)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _counting(count: torch.Tensor, tokens: int) -> Any:
    def hook(_layer: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        for value in (*args, *more.values()):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
                if len(value) == tokens:
                    ids = value.flatten().cpu().long()
                    known = ids[(ids >= 0) & (ids < len(count))]  # others have no weights
                    count.add_(torch.bincount(known, minlength=len(count)))
                return

    return hook
