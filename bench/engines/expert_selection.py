"""How often each expert of a model of transformers is selected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def selections(layers: list[torch.nn.Module], tokens: int) -> Iterator[list[torch.Tensor | None]]:
    """Count how often each layer selects each of its experts.

    Args:
        layers: modules that hold the experts of a layer.
        tokens: only calls with so many tokens count: one of each sequence in decode.

    Yields:
        Of each layer, float32 of shape [experts] on the CPU. After the block it is None for a layer
        that was called without the indices of the experts that each token goes to.
    """
    counts: list[torch.Tensor | None] = []
    handles = []
    for index, layer in enumerate(layers):
        counts.append(torch.zeros(int(layer.num_experts)))  # type: ignore[arg-type]
        hook = _counting(counts, index, tokens)
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _counting(counts: list[torch.Tensor | None], index: int, tokens: int) -> Any:
    def hook(_layer: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        count = counts[index]
        if count is None:
            return
        for value in (*args, *more.values()):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
                if len(value) == tokens:
                    ids = value.flatten().cpu().long()
                    known = ids[(ids >= 0) & (ids < len(count))]  # others have no weights
                    count.add_(torch.bincount(known, minlength=len(count)))
                return
        counts[index] = None

    return hook
