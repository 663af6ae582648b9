"""Where a kernel is worth calling, by what the judge measured."""

from __future__ import annotations

from collections.abc import Iterable

from patcher.bench import AxisGuard, Contract, Evaluation


def worth_calling(contract: Contract, evaluations: Iterable[Evaluation]) -> dict[str, AxisGuard]:
    """The op's guards, cut to the sizes at which the kernel is not slower than the baseline.

    Along the axis that each verdict swept, sizes beyond the outermost points at which it is not
    surely slower (the whole interval of its speedup below 1) are left to the engine's own code
    where a slower point lies there. A slow point between good ones cannot be left out. A kernel
    that is slower everywhere keeps its guards: whoever makes a patch of it wants to see it run.
    """
    axes = dict(contract.guards.axes)
    for evaluation in evaluations:
        axes |= _cut(axes, contract, evaluation)
    return axes


def _cut(
    axes: dict[str, AxisGuard], contract: Contract, evaluation: Evaluation
) -> dict[str, AxisGuard]:
    """The guards of one axis that one verdict makes narrower, if it does."""
    sweep = next((one for one in contract.sweeps if one.name == evaluation.sweep), None)
    if sweep is None:
        return {}
    found = {
        one.axes[sweep.axis]: one.speedup_high >= 1
        for one in evaluation.timings
        if sweep.axis in one.axes
    }
    good = sorted(size for size, worth in found.items() if worth)
    if not good:
        return {}
    guard, cut = axes.get(sweep.axis, AxisGuard()), {}
    if min(found) < good[0]:
        cut["minimum"] = max(guard.minimum, good[0])
    if max(found) > good[-1]:
        cut["maximum"] = min(guard.maximum or good[-1], good[-1])
    return {sweep.axis: guard.model_copy(update=cut)} if cut else {}
