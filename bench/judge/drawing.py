"""Points of a verdict that no file names, drawn within the guards of a contract."""

from __future__ import annotations

import random

from patcher.bench.ops.contract import AxisGuard, Contract, Point, Sweep

WIDTHS = 2
"""Points of a verdict with other widths. Each new width costs a just-in-time compilation."""


def drawn_points(contract: Contract, sweep: Sweep, draw: random.Random) -> list[Point]:
    """Draw points that no file names, within the guards of a contract.

    The swept and hidden shapes stand in `op.toml`, so a candidate could be right at these alone. A
    guard lets the engine call a kernel at every size within it, so some of them are tried, too.

    Every combination of dtypes gets two numbers of rows: an odd one and any other. `WIDTHS` points
    also change the axes whose guard is a multiple, such as `hidden`. No axis exceeds what the sweep
    or a hidden shape has, so that every point is as possible as those.

    Args:
        contract: the op's contract.
        sweep: the sweep that is judged.
        draw: the source of random numbers.
    """
    points = []
    for dtypes in contract.dtype_choices():
        for odd in (True, False):
            axes = _rows(contract, sweep, draw, odd)
            points.append(Point(axes=axes, dtypes=dtypes))
    for _ in range(WIDTHS):
        axes = _rows(contract, sweep, draw, odd=False)
        if contract.hidden and draw.random() < 0.5:
            shape = draw.choice(contract.hidden).axes
            axes = {**shape, sweep.axis: _within(contract, sweep.axis, shape[sweep.axis], draw)}
        for axis, guard in contract.guards.axes.items():
            if guard.multiple_of > 1 and axis in axes:
                axes[axis] = _within(contract, axis, axes[axis], draw)
        points.append(Point(axes=axes, dtypes=sweep.dtypes))
    return points


def _rows(contract: Contract, sweep: Sweep, draw: random.Random, odd: bool) -> dict[str, int]:
    """The sweep's axes with another size of the swept one, odd if its guard allows that."""
    size = _within(contract, sweep.axis, max(sweep.values), draw)
    guard = _guard(contract, sweep.axis)
    less = size - guard.multiple_of
    if odd and less > 0 and less % 2 and size % 2 == 0 and guard.takes(less):
        size = less
    return {sweep.axis: size, **sweep.fixed}


def _within(contract: Contract, axis: str, most: int, draw: random.Random) -> int:
    """A size of the axis that its guard allows, from 1 to `most`."""
    guard = _guard(contract, axis)
    step = guard.multiple_of
    largest = most if guard.maximum is None else min(most, guard.maximum)
    fewest = -(-max(guard.minimum, 1) // step)
    return step * draw.randint(min(fewest, largest // step), largest // step)


def _guard(contract: Contract, axis: str) -> AxisGuard:
    return contract.guards.axes.get(axis, AxisGuard())
