"""Check the arguments of public functions: a wrong one is a `UsageError` that names it."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from patcher.bench.errors import UsageError
from patcher.bench.records import first_error

P = ParamSpec("P")
R = TypeVar("R")


def _possible(path: str | Path) -> str | Path:
    if "\0" in str(path):
        raise ValueError("a path without NUL characters")
    if path == "":
        raise ValueError("a path that is not empty")
    return path


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
MOST_THREADS = 1024
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
"""CPU threads."""
Timeout = Annotated[float, Field(ge=0.1, le=86_400, allow_inf_nan=False)]
"""Seconds, a day at most."""
FilePath = Annotated[str | Path, AfterValidator(_possible)]
FilePaths = FilePath | Sequence[FilePath]
"""One path, or several; see `as_paths`."""


def as_paths(value: FilePaths) -> tuple[str | Path, ...]:
    """One path or several as a tuple; a string is one path."""
    return (value,) if isinstance(value, (str, Path)) else tuple(value)


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Check each argument against its annotation before the function runs.

    Annotations are checked as pydantic checks a field, bounds in `Annotated` among them. Defaults
    and arguments without an annotation are not checked.

    Raises:
        UsageError: an argument has another type, or is out of its bounds.
    """
    signature = inspect.signature(function)

    @functools.cache
    def checks() -> dict[str, TypeAdapter[Any]]:
        hints = get_type_hints(function, include_extras=True)
        return {n: TypeAdapter(hints[n]) for n in signature.parameters if n in hints}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            if check := checks().get(name):
                given.arguments[name] = _valid(name, value, check)
        return function(*given.args, **given.kwargs)

    return checked


def _valid(name: str, value: object, check: TypeAdapter[Any]) -> Any:
    try:
        return check.validate_python(value)
    except ValidationError as error:
        _, wrong, _ = first_error(error)
    wanted = wrong.removeprefix("Input should be ").partition(", ")[0]
    raise UsageError(
        f"{name} should be {wanted}, not {reprlib.repr(value)}", f"give another value for {name}"
    )
