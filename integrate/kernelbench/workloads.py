"""Which sizes of a problem with several workloads are timed, and which are checked alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from patcher.bench import Record, arithmetic_value

MOST_CHECKED = 6
"""Workloads besides the timed ones whose sizes are checked."""


class WorkloadSizes(Record):
    """Sizes by the names of an op's axes."""

    axis: str
    values: tuple[int, ...]
    """Timed, at the sizes of `fixed`."""
    fixed: dict[str, int]
    checked: tuple[dict[str, int], ...]
    """Of other workloads: checked alone."""
    unjudged: int
    """Workloads that are neither."""


def chosen(
    workloads: Sequence[Mapping[str, int]],
    own_axes: Mapping[str, str],
    sizes: Mapping[str, int],
    limits: Mapping[str, Mapping[str, int]],
) -> WorkloadSizes | None:
    """The largest workload, and those that differ from it along one axis alone, are timed.

    Args:
        workloads: sizes by the problem's own names of axes.
        own_axes: these names, by the op's axes.
        sizes: of each axis of the op, where a workload has none.
        limits: the sizes that the graph takes, by axis: `minimum`, `multiple_of`, `maximum`.

    Returns:
        None: the graph takes no workload.
    """
    every = [
        {axis: each.get(own_axes.get(axis, ""), size) for axis, size in sizes.items()}
        for each in workloads
    ]
    taken = [each for each in every if all(_takes(limits[axis], each[axis]) for axis in each)]
    if not taken:
        return None
    largest = max(taken, key=_work)
    along = {axis: _along(axis, largest, taken) for axis in largest}
    axis = max(along, key=lambda name: len(along[name]))
    timed = [{**largest, axis: value} for value in along[axis]]
    others = sorted((each for each in _distinct(taken) if each not in timed), key=_work)
    checked = others[:MOST_CHECKED]
    judged = timed + checked
    return WorkloadSizes(
        axis=axis,
        values=tuple(along[axis]),
        fixed={name: size for name, size in largest.items() if name != axis},
        checked=tuple(checked),
        unjudged=sum(each not in judged for each in every),
    )


def fits(
    workload: Mapping[str, int],
    own_axes: Mapping[str, str],
    shapes: Sequence[tuple[Sequence[str], Sequence[str]]],
) -> bool:
    """Whether an op has the sizes of a workload.

    Args:
        workload: the size of each of the problem's axes.
        own_axes: the problem's names of axes, by the op's.
        shapes: those of tensors, as the problem says and over the op's axes.
    """
    sizes = {axis: workload[own] for axis, own in own_axes.items()}
    for own, shape in shapes:
        if len(own) != len(shape):
            return False
        for said, text in zip(own, shape, strict=True):
            try:
                size = arithmetic_value(text, sizes)
            except (ArithmeticError, KeyError):
                return False
            if size != (workload[said] if said in workload else int(said)):
                return False
    return True


def tied(symbols: Mapping[str, int], axes: Mapping[str, str]) -> dict[str, int] | None:
    """The sizes of an op's axes at those of a trace's symbols; None if they contradict each other.

    Args:
        symbols: sizes of the symbols.
        axes: what each symbol is: an axis, or arithmetic over axes.
    """
    sizes = {axis: symbols[name] for name, axis in axes.items() if axis.isidentifier()}
    try:
        same = all(arithmetic_value(axes[name], sizes) == size for name, size in symbols.items())
    except ArithmeticError:
        return None
    return sizes if same else None


def _takes(limit: Mapping[str, int], size: int) -> bool:
    most = limit.get("maximum", size)
    return limit["minimum"] <= size <= most and size % limit["multiple_of"] == 0


def _along(axis: str, largest: Mapping[str, int], taken: Sequence[Mapping[str, int]]) -> list[int]:
    """Sizes of an axis in the workloads that have the largest one's other sizes."""
    return sorted(
        {
            each[axis]
            for each in taken
            if all(each[name] == size for name, size in largest.items() if name != axis)
        }
    )


def _work(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.values())


def _distinct(every: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    return [each for index, each in enumerate(every) if each not in every[:index]]
