"""The arithmetic of a contract: sizes and costs over axis names, and back from sizes to axes."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from functools import cache


def evaluate(expression: str, names: Mapping[str, float]) -> float:
    """Evaluate `+ - * / //`, `min`, `max` and `pow` (of floats) over numbers and names.

    Raises:
        KeyError: a name is unknown.
        ValueError: the expression contains anything else.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = value(left), value(right)
                match operator:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.Div():
                        return a / b
                    case ast.FloorDiv():
                        return a // b
            case ast.Call(func=ast.Name(id="min"), args=[*several], keywords=[]):
                return min(value(each) for each in several)
            case ast.Call(func=ast.Name(id="max"), args=[*several], keywords=[]):
                return max(value(each) for each in several)
            case ast.Call(func=ast.Name(id="pow"), args=[base, exponent], keywords=[]):
                # as floats, so that no number grows without bound
                return math.pow(value(base), value(exponent))
        raise ValueError(f"not arithmetic: {expression}")

    return value(_parsed(expression))


class UnsolvableError(ValueError):
    """No axes give an expression its size."""

    def __init__(self, expression: str, size: int) -> None:
        super().__init__(f"{expression} is {size}")
        self.expression = expression


def solve(sizes: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Solve for the axes, given the size of each expression, as far as possible.

    An axis that no expression names alone is solved from one in which it is the only unknown and
    linear (`q_heads * head_dim`, if head_dim is known).

    Raises:
        UnsolvableError: no axes give these sizes.
    """
    axes: dict[str, int] = {}
    waiting = list(sizes)
    while waiting:
        left = []
        for expression, size in waiting:
            unknown = names_in(expression) - axes.keys()
            if not unknown:
                if evaluate(expression, axes) != size:
                    raise UnsolvableError(expression, size)
            elif len(unknown) > 1 or not _found(expression, size, next(iter(unknown)), axes):
                left.append((expression, size))
        if len(left) == len(waiting):
            break
        waiting = left
    return axes


def _found(expression: str, size: int, name: str, axes: dict[str, int]) -> bool:
    """Solve for the one unknown axis; False if the size does not determine it."""
    base = evaluate(expression, {**axes, name: 0})
    slope = evaluate(expression, {**axes, name: 1}) - base
    if slope == 0:
        if base != size:
            raise UnsolvableError(expression, size)
        return False
    value = (size - base) / slope
    if value < 0 or value != int(value) or evaluate(expression, {**axes, name: value}) != size:
        raise UnsolvableError(expression, size)
    axes[name] = int(value)
    return True


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


@cache
def names_in(expression: str) -> frozenset[str]:
    """Axes and dtype symbols that an expression depends on."""
    found = {node.id for node in ast.walk(_parsed(expression)) if isinstance(node, ast.Name)}
    return frozenset(found - {"min", "max", "pow"})
