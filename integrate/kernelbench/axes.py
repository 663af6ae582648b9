"""The axes of an op, of which the sizes of a trace are made."""

from __future__ import annotations

import math
import re

from patcher.bench import arithmetic_value, names_in
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.names import identifier, replaced
from patcher.integrate.kernelbench.problem import Problem, ProblemTrace


def op_axes(
    problem: Problem, trace: ProblemTrace, names: dict[str, str], taken: set[str]
) -> tuple[dict[str, str], str, dict[str, str]]:
    """The axis of each symbol; without any, an axis that has one size. And the problem's own names
    of axes, by the op's."""
    axes: dict[str, str] = {}
    own_axes: dict[str, str] = {}
    said: dict[str, tuple[str, str]] = {}
    for each in trace.tensors:
        for index, size in enumerate(each.shape):
            if size in trace.symbols and trace.sizes:
                own = dict(enumerate(problem.axes.get(each.name, ()))).get(index, "")
                said.setdefault(size, (own, f"{names[each.node]}_{index}"))
    names_alone = {own for own, _ in said.values() if own.isidentifier()}
    by_own: dict[str, str] = {}
    later: dict[str, str] = {}
    for size, (own, usual) in said.items():
        if own and not own.isidentifier() and names_in(own) <= names_alone:
            later[size] = own  # the file says how it follows from other axes
        elif own in by_own:
            axes[size] = by_own[own]
        else:
            axes[size] = identifier(own if own.isidentifier() else usual, taken)
            if own.isidentifier():
                by_own[own], own_axes[axes[size]] = axes[size], own
    for size, own in later.items():
        axes[size] = f"({replaced(own, by_own)})"
    if axes and set(axes) != set(trace.symbols):
        raise Refused("its sizes depend on one that no input has")
    if axes:
        return axes, "", own_axes
    first = trace.tensors[0] if trace.tensors else None
    if first is None or not first.shape:
        raise Refused("its first input has no axes")
    alone = identifier(f"{names[first.node]}_0", taken)
    # every symbol becomes its size
    return {name: str(symbol.size) for name, symbol in trace.symbols.items()}, alone, {}


def op_shape(sizes: tuple[str, ...], axes: dict[str, str], alone: str) -> tuple[str, ...]:
    """Sizes over axes, folded to a number where nothing is free."""
    shape = [over_axes(size, axes) for size in sizes]
    return (alone, *shape[1:]) if alone else tuple(shape)


def over_axes(text: str, axes: dict[str, str]) -> str:
    """A size of a trace over an op's axes; digits where none is free.

    Raises:
        Refused: it names another symbol, or is no arithmetic.
    """
    if set(re.findall(r"[A-Za-z_]\w*", text)) - axes.keys():
        raise Refused("its trace names a size that it does not define")
    expression = replaced(text, axes)
    try:
        names = names_in(expression)
        if names - set().union(*map(names_in, axes.values())):
            raise Refused("its trace names a size that it does not define")
        value = arithmetic_value(expression, dict.fromkeys(names, 64))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        raise Refused("its trace has a size that is no arithmetic") from error
    if not names:
        return str(int(value))
    return expression


def axis_limits(trace: ProblemTrace, axes: dict[str, str]) -> dict[str, dict[str, int]]:
    """The guard of each axis, which several symbols may have."""
    limits: dict[str, dict[str, int]] = {}
    for symbol, axis in axes.items():
        if not axis.isidentifier():
            continue
        free = trace.symbols[symbol]
        known = limits.setdefault(axis, {"minimum": 0, "multiple_of": 1})
        known["minimum"] = max(known["minimum"], free.least)
        known["multiple_of"] = math.lcm(known["multiple_of"], free.multiple)
        if free.most:
            known["maximum"] = min(known.get("maximum", free.most), free.most)
    return limits
