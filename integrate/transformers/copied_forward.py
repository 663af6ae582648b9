"""A copy of a module's forward that calls another function by one of its names.

The function of that name belongs to a whole file of transformers, so it stays: other models of the
process call it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from patcher.bench import VerificationError
from patcher.integrate.transformers.swap import Forward


def with_function(function: Any, name: str, replaced: Callable[[Forward], Forward]) -> Any:
    """A copy of a forward, decorators included, that calls another function.

    Args:
        function: the method, or what a decorator made of it.
        name: the function's name in the forward's file.
        replaced: returns the other function, given the one of that name.

    Raises:
        VerificationError: it is not a function that calls one by this name.
    """
    inner, closure = getattr(function, "__wrapped__", None), getattr(function, "__closure__", None)
    names = getattr(function, "__globals__", {})
    if inner is not None and closure:
        within = with_function(inner, name, replaced)
        own, closure = (
            closure,
            tuple(CellType(within) if cell.cell_contents is inner else cell for cell in closure),
        )
        fits = any(now is not then for now, then in zip(closure, own, strict=True))
    else:
        fits = inner is None and name in names
    if not (isinstance(function, FunctionType) and fits):
        raise VerificationError(
            f"{getattr(function, '__qualname__', 'a forward')} is not a function that calls {name}",
            "remove the other patch first",
        )
    if inner is None:
        # without `__name__`, torch.compile uses these globals instead of the module's
        names = {key: value for key, value in names.items() if key != "__name__"}
        names[name] = replaced(names[name])
    # torch.compile identifies functions by their code object, so each gets its own
    code = function.__code__.replace()
    made = FunctionType(code, names, "forward", function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
