"""What dispatch remembers a call by: all that its guards depend on, and nothing of its values.

This is what a served engine imports: torch and the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LARGEST_ALIGNMENT = 16
"""Bytes: the widest load of a GPU."""


def key_of(tensors: int) -> Callable[..., tuple[object, ...]]:
    """A function from a call's arguments to what its guards depend on.

    Written out for that many tensors, since a loop takes twice as long.
    """
    names = _names(tensors)
    facts = [
        f"{name}.shape, {name}.dtype, {name}.device, {name}.is_contiguous() or {name}.stride()"
        for name in names
    ]
    source = f"lambda {', '.join(names)}, *_: ({', '.join(facts)}, {_alignment(names)})"
    made: Callable[..., tuple[object, ...]] = eval(source)
    return made


def matcher_of(tensors: int) -> Callable[..., Callable[..., bool]]:
    """A function from a call's arguments to one that knows calls like it.

    The same facts as in the key: torch's own guard of compiled code compares shapes, strides,
    dtypes and devices of all tensors in one call, four times as quickly as their attributes are
    read here. It is an internal of torch; where it is not to be had, every call makes its key.
    """
    names = _names(tensors)
    parameters = ", ".join(names)
    source = (
        f"lambda same, alignment: lambda {parameters}, *_: "
        f"same({parameters}) and {_alignment(names)} == alignment"
    )
    made: Callable[..., Callable[..., bool]] = eval(source)
    alignment: Callable[..., int] = eval(f"lambda {parameters}: {_alignment(names)}")

    def matcher(*args: Any) -> Callable[..., bool]:
        try:
            from torch._C._dynamo.guards import TensorGuards

            guards: Any = TensorGuards(
                *args[:tensors], dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
        except (ImportError, TypeError):
            return never
        return made(guards.check, alignment(*args[:tensors]))

    return matcher


def _names(tensors: int) -> list[str]:
    return [f"a{index}" for index in range(tensors)]


def _alignment(names: list[str]) -> str:
    return f"({' | '.join(f'{name}.data_ptr()' for name in names)}) % {_LARGEST_ALIGNMENT}"


def never(*args: Any) -> bool:
    """Knows no call."""
    return False
