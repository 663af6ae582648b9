"""What is done in the processes that have vLLM's model: this one, or one for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from patcher.bench.engines import Decoding, Generation

_OPENED = "patcher_opened"
"""The attribute of a worker that has its open contexts."""


class Running(Protocol):
    """An engine with workers."""

    requests: int
    """Number of requests until now; request ids contain it."""

    def on_workers(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of a module with each worker, in its process.

        Returns:
            What each call returned, by rank.
        """
        ...

    def prefill(self, prompts: torch.Tensor) -> Decoding: ...
    def decode(self, decoding: Decoding, steps: int) -> None: ...
    def release(self, decoding: Decoding) -> None: ...
    def generate(self, prompts: torch.Tensor, steps: int) -> Generation: ...


@contextmanager
def on_each(
    engine: Running, opened: Callable[..., AbstractContextManager[Any]], *arguments: Any
) -> Iterator[list[Any]]:
    """Open a context in each worker while the block runs.

    Args:
        opened: makes the context from a worker and the arguments; a function of a module.

    Yields:
        A list which, after the block, has what each worker's context gave, by rank.
    """
    values: list[Any] = []
    engine.on_workers(_enter, opened, arguments)
    try:
        yield values
    finally:
        values += engine.on_workers(_leave, opened.__name__)


def _enter(
    worker: Any, opened: Callable[..., AbstractContextManager[Any]], arguments: tuple[Any, ...]
) -> None:
    stack = ExitStack()
    value = stack.enter_context(opened(worker, *arguments))
    vars(worker).setdefault(_OPENED, {})[opened.__name__] = (stack, value)


def _leave(worker: Any, name: str) -> Any:
    stack, value = vars(worker)[_OPENED].pop(name)
    stack.close()
    return value
