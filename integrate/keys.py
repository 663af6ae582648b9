"""Keys of calls for dispatch: everything that guards depend on, and no values. Classes of tensors
are in them, since torch's test of a call compares those, too.

A served engine imports this module, so it uses only torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LARGEST_ALIGNMENT = 16
"""Bytes: the widest load of a GPU."""


def key_of(tensors: int) -> Callable[..., tuple[object, ...]]:
    """A function that maps a call's arguments to a key of everything its guards depend on.

    The code is unrolled for that many tensors, since a loop takes twice as long.
    """
    names = _names(tensors)
    facts = [
        f"{name}.__class__, {name}.shape, {name}.dtype, {name}.device, "
        f"{name}.is_contiguous() or {name}.stride()"
        for name in names
    ]
    source = f"lambda {', '.join(names)}, *_: ({', '.join(facts)}, {_alignment(names)})"
    key: Callable[..., tuple[object, ...]] = eval(source)
    return key


def matcher_of(tensors: int) -> Callable[..., Callable[..., bool]]:
    """A function that maps a call's arguments to a fast test for calls with the same key.

    The test uses torch's own guard of compiled code, which compares shapes, strides, dtypes and
    devices in one call, four times as fast as reading the attributes. The guard is internal to
    torch; without it the test never matches, and every call computes its key.
    """
    names = _names(tensors)
    parameters = ", ".join(names)
    source = (
        f"lambda same, alignment: lambda {parameters}, *_: "
        f"same({parameters}) and {_alignment(names)} == alignment"
    )
    test: Callable[..., Callable[..., bool]] = eval(source)
    alignment: Callable[..., int] = eval(f"lambda {parameters}: {_alignment(names)}")

    def matcher(*args: Any) -> Callable[..., bool]:
        try:
            from torch._C._dynamo.guards import TensorGuards

            guards: Any = TensorGuards(
                *args[:tensors], dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
        except (ImportError, TypeError):
            return never
        return test(guards.check, alignment(*args[:tensors]))

    return matcher


def _names(tensors: int) -> list[str]:
    return [f"a{index}" for index in range(tensors)]


def _alignment(names: list[str]) -> str:
    return f"({' | '.join(f'{name}.data_ptr()' for name in names)}) % {_LARGEST_ALIGNMENT}"


def never(*args: Any) -> bool:
    """A test that matches no call."""
    return False
