"""Copies of a module's forward, decorators included: with another function by one of its names, or
with other text.

A forward and the functions that it calls belong to a whole file of transformers, so they stay:
other models of the process call them, too.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any

import torch

from patcher.bench import VerificationError
from patcher.integrate.transformers.parts import kind_of
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

    def calls_another(forward: FunctionType) -> FunctionType | None:
        if name not in forward.__globals__:
            return None
        # without `__name__`, torch.compile uses these globals instead of the module's
        names = {key: value for key, value in forward.__globals__.items() if key != "__name__"}
        names[name] = replaced(names[name])
        return _copy(forward, names, forward.__closure__)

    made = _within(function, calls_another)
    if made is None:
        raise VerificationError(
            f"{getattr(function, '__qualname__', 'a forward')} is not a function that calls {name}",
            "remove the other patch first",
        )
    return made


def forward_with_function(
    part: Any,
    name: str,
    replaced: Callable[[Forward], Forward],
    refuse: Callable[[str], None],
    original: Forward,
) -> Forward:
    """The forward of a module that calls another function by a name of its file, and gives way to
    the module's own once other code has put a function into that file.

    Args:
        part: the module.
        name, replaced: as of `with_function`, which raises.
        refuse: counts a call that is the module's own, with its reason.
        original: the module's own forward.
    """
    own = kind_of(part).forward
    ours, file = with_function(own, name, replaced), _NamesInFile(own)

    def forward(*args: Any, **more: Any) -> Any:
        if _stand_for_others(file):
            refuse("a function of its file was replaced")
            return original(*args, **more)
        return ours(part, *args, **more)

    return forward


def with_text(function: Any, text: ast.FunctionDef, free: str, value: object) -> Any:
    """A copy of a forward, decorators included, that has another text; None if what is around it
    cannot be copied.

    Args:
        function: the method, or what a decorator made of it.
        text: the other text, with the same arguments.
        free: a name in it that the forward's file does not have.
        value: what that name stands for.
    """

    def other(forward: FunctionType) -> FunctionType | None:
        if forward.__closure__ is not None:
            return None
        around = ast.parse(f"def around({free}): pass").body[0]
        assert isinstance(around, ast.FunctionDef)
        around.body = [text]
        tree = ast.fix_missing_locations(ast.Module([around], []))
        outer = compile(tree, forward.__code__.co_filename, "exec")
        [outer] = [each for each in outer.co_consts if isinstance(each, CodeType)]
        [code] = [each for each in outer.co_consts if isinstance(each, CodeType)]
        return _copy(forward, forward.__globals__, (CellType(value),), code)

    return _within(function, other)


class _NamesInFile:
    """What the names of a file stand for by which a forward calls others, when it is copied."""

    def __init__(self, forward: Any) -> None:
        inner = inspect.unwrap(forward)
        self.names: dict[str, Any] = inner.__globals__
        self.known = {each: self.names.get(each) for each in inner.__code__.co_names}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _stand_for_others(file: _NamesInFile) -> bool:
    """Whether other code has put another function under such a name since."""
    return any(file.names.get(name) is not was for name, was in file.known.items())


def _within(function: Any, remake: Callable[[FunctionType], FunctionType | None]) -> Any:
    """A function with another one innermost, under copies of its decorators; None if there is a
    decorator that does not keep what it decorates in its closure."""
    if not isinstance(function, FunctionType):
        return None
    inner, closure = getattr(function, "__wrapped__", None), function.__closure__
    if inner is None:
        return remake(function)
    within = _within(inner, remake) if closure else None
    cells = tuple(CellType(within) if c.cell_contents is inner else c for c in closure or ())
    if within is None or cells == closure:
        return None
    return _copy(function, function.__globals__, cells)


def _copy(
    function: FunctionType,
    names: dict[str, Any],
    closure: tuple[CellType, ...] | None,
    code: CodeType | None = None,
) -> FunctionType:
    # torch.compile identifies functions by their code object, so each gets its own
    code = (code or function.__code__).replace()
    made = FunctionType(code, names, "forward", function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
