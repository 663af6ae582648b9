"""Which sizes of a problem with several workloads are timed, and which are checked alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from patcher.bench import Record

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
    least: Mapping[str, int],
) -> WorkloadSizes | None:
    """The largest workload, and those that differ from it along one axis alone, are timed.

    Args:
        workloads: sizes by the problem's own names of axes.
        own_axes: these names, by the op's axes.
        sizes: of each axis of the op, where a workload has none.
        least: the smallest size that the graph takes, by axis.

    Returns:
        None: the graph takes no workload.
    """
    every = [
        {axis: each.get(own_axes.get(axis, ""), size) for axis, size in sizes.items()}
        for each in workloads
    ]
    taken = [each for each in every if all(size >= least[axis] for axis, size in each.items())]
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
