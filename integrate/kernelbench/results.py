"""The form of a module's result: a tensor, or tensors in tuples, lists and dictionaries.

In a trace it is the index of a tensor, `{"tuple": [FORM, ...]}`, `{"list": [FORM, ...]}` or
`{"dict": [[LITERAL, FORM], ...]}`. Here it becomes Python source, with names in place of indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.problem import literal


def form_of(result: Any, count: int) -> Any:
    """The form that a record holds; where it holds none, a tensor or a tuple of several."""
    if result is not None:
        return result
    return 0 if count == 1 else {"tuple": list(range(count))}


def packed(form: Any, tensors: Sequence[str]) -> str:
    """The result as an expression.

    Args:
        tensors: an expression of each tensor, in order.

    Raises:
        Refused: it is no form of so many tensors.
    """
    if [index for index, _ in _leaves(form, "")] != list(range(len(tensors))):
        raise Refused("its trace holds a result of another form")
    return _packed(form, tensors)


def unpacked(form: Any, value: str) -> list[str]:
    """An expression of each tensor of a result.

    Args:
        value: the name of the result.

    Raises:
        Refused: it is no form.
    """
    return [path for _, path in _leaves(form, value)]


def is_flat(form: Any) -> bool:
    """Whether it is a tensor, or tensors in order."""
    match form:
        case {"tuple": list(items)} | {"list": list(items)}:
            return all(isinstance(each, int) for each in items)
    return isinstance(form, int)


def _packed(form: Any, tensors: Sequence[str]) -> str:
    match form:
        case {"tuple": list(items)}:
            return f"({''.join(f'{_packed(each, tensors)}, ' for each in items).rstrip()})"
        case {"list": list(items)}:
            return f"[{', '.join(_packed(each, tensors) for each in items)}]"
        case {"dict": list(items)}:
            inside = (f"{literal(key)}: {_packed(each, tensors)}" for key, each in items)
            return f"{{{', '.join(inside)}}}"
    return tensors[int(form)]


def _leaves(form: Any, path: str) -> Iterator[tuple[int, str]]:
    match form:
        case int() if not isinstance(form, bool):
            yield form, path
        case {"tuple": list(items)} | {"list": list(items)}:
            for index, each in enumerate(items):
                yield from _leaves(each, f"{path}[{index}]")
        case {"dict": list(items)}:
            for pair in items:
                if not isinstance(pair, list | tuple) or len(pair) != 2:
                    raise Refused("its trace holds a result of another form")
                yield from _leaves(pair[1], f"{path}[{literal(pair[0])}]")
        case _:
            raise Refused("its trace holds a result of another form")
