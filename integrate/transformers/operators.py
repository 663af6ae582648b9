"""The operators of PyTorch that a function runs: its fingerprint by what it does, not by its text.

A probe of numbers misses what is far from the numbers tried: a clamp of large values, a branch for
others. As an operator it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_PLACES = {
    *(
        "view",
        "_to_copy",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
    ),
    *("t", "transpose", "permute", "clone", "contiguous", "alias", "detach", "to", "type_as"),
}
"""Operators that move numbers, or give them another dtype."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # `div_` is `div` with the place of its result
        self.seen[name.rstrip("_") if not name.startswith("_") else name] = None
        return func(*args, **(kwargs or {}))


def further_operators(
    function: Callable[..., Any], *args: Any, known: Collection[str]
) -> tuple[Any, list[str]]:
    """What a function returns, and the operators that it runs besides some.

    Args:
        function: what to call.
        args: its arguments.
        known: names of operators, as `softmax`; those that only move numbers are known.
    """
    with _Recorder() as recorder:
        result = function(*args)
    names = (name.lstrip("_") for name in recorder.seen if name not in _PLACES)
    return result, [name for name in dict.fromkeys(names) if name not in known]
