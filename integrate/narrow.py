"""Narrow a patch's guards to the sizes at which the judge did not find its kernel slower."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.bench import AxisGuard, Contract, Evaluation, sweep_named
from patcher.bench.engines.served_axes import served_axes
from patcher.integrate.manifest import JudgedShape


def worth_calling(contract: Contract, evaluations: Sequence[Evaluation]) -> dict[str, AxisGuard]:
    """The op's guards, narrowed to the sizes at which the kernel is not slower than the baseline.

    A point is slower if the whole interval of its speedup lies below 1. Along each swept axis, the
    kernel is called from the first to the last point of the longest run without a slower one. A
    kernel that is slower everywhere keeps its guards, so that it can run at all. Of several
    verdicts, each narrows: a shape that none is about may be like any of theirs.
    """
    axes = dict(contract.guards.axes)
    for evaluation in evaluations:
        axes |= _cut(axes, contract, evaluation)
    return axes


def judged_shapes(
    contract: Contract, evaluations: Sequence[Evaluation], axes: dict[str, AxisGuard]
) -> tuple[JudgedShape, ...]:
    """Shapes whose own verdicts allow what the others' guards do not.

    A call does not tell how long its requests are, so that verdicts over a paged cache which differ
    in lengths alone are about one shape, and each narrows.

    Args:
        axes: what `worth_calling` gave.
    """
    names = served_axes(contract.name)
    room = names.room if names is not None else frozenset[str]()
    judged: list[tuple[dict[str, int], str, dict[str, AxisGuard]]] = []
    for evaluation in evaluations:
        sweep = sweep_named(contract, evaluation.sweep)
        if sweep is None or not evaluation.timings or _slower_everywhere(evaluation):
            continue
        left_out = {sweep.axis, *room}
        known = evaluation.timings[0].axes
        sizes = {axis: size for axis, size in known.items() if axis not in left_out}
        own = next((own for *shape, own in judged if shape == [sizes, sweep.axis]), None)
        if own is None:
            own = dict(contract.guards.axes)
            judged.append((sizes, sweep.axis, own))
        own |= _cut(own, contract, evaluation)
    return tuple(
        JudgedShape(sizes=sizes, axis=axis, guard=own.get(axis, AxisGuard()))
        for sizes, axis, own in judged
        if own.get(axis, AxisGuard()) != axes.get(axis, AxisGuard())
    )


def _slower_everywhere(evaluation: Evaluation) -> bool:
    return all(one.speedup_high < 1 for one in evaluation.timings)


def _cut(
    axes: dict[str, AxisGuard], contract: Contract, evaluation: Evaluation
) -> dict[str, AxisGuard]:
    """The guard of the swept axis if one verdict narrows it, else nothing."""
    sweep = sweep_named(contract, evaluation.sweep)
    if sweep is None:
        return {}
    points = {
        one.axes[sweep.axis]: one.speedup_high >= 1
        for one in evaluation.timings
        if sweep.axis in one.axes
    }
    runs: list[list[int]] = [[]]
    for size in sorted(points):
        if points[size]:
            runs[-1].append(size)
        else:
            runs.append([])
    good = max(runs, key=len)  # the first of equal ones, since decode has few tokens
    if not good:
        return {}
    guard, cut = axes.get(sweep.axis, AxisGuard()), {}
    if min(points) < good[0]:
        cut["minimum"] = max(guard.minimum, good[0])
    if max(points) > good[-1]:
        cut["maximum"] = min(guard.maximum or good[-1], good[-1])
    return {sweep.axis: guard.model_copy(update=cut)} if cut else {}
