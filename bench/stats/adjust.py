"""What log-ratios of pairs are freed of before their mean is taken: their order, and stalls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FAR_OUT = 4.0
"""Standard deviations from the median, by the median distance of two pairs, beyond which a pair
counts as if it lay there. Of normal values one in 16,000 does."""
_APART_TO_SD = 1 / (math.sqrt(2) * statistics.NormalDist().inv_cdf(0.75))
"""From the median distance of two normal values to their standard deviation."""


class Ordered(NamedTuple):
    """Log-ratios without what an arm gains by its place in the pair."""

    ratios: list[float]
    effect: float | None
    """Log-ratio by which the arm that begins is the faster one; None: no process pair has pairs in
    either order, nothing is taken out."""


def without_order(
    ratios: Sequence[float],
    patched_first: Sequence[bool],
    processes: Sequence[int] | None = None,
) -> Ordered:
    """Log-ratios freed of the order effect, which has the other sign where the other arm begins.

    The first window after prefill runs at a lower clock than the second on a GPU that prefill took
    to its power cap: 0.6 % on an H200, where pairs else differ by 0.2 %. Orders that alternate
    cancel it in the mean, but it stays in the spread, and in the mean of an odd number of pairs.
    (The period effect of a crossover trial: Hills and Armitage, Br. J. Clin. Pharmacol. 8, 7, 1979;
    by the median of all differences, which stalls do not move: Sen, J. Am. Statist. Assoc. 63,
    1379, 1968.)

    Args:
        patched_first: of each pair, whether the patched arm began.
        processes: the process pair of each. Only pairs of the same one are held against each other,
            since what processes differ by is no effect of order.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    first = np.asarray(patched_first, dtype=np.bool_)
    differences = [
        np.subtract.outer(values[own & first], values[own & ~first]).ravel()
        for own in _owned(len(values), processes)
    ]
    between = np.concatenate(differences)
    if not len(between):
        return Ordered(list(ratios), None)
    effect = float(np.median(between)) / 2
    return Ordered((values - effect * np.where(first, 1.0, -1.0)).tolist(), effect)


def winsorised(
    ratios: Sequence[float], processes: Sequence[int] | None = None
) -> tuple[list[float], int]:
    """Log-ratios with those far out moved to where far out begins, and how many those were.

    A machine that stands still for 20 ms makes a window 7 % slower, and one such pair in a hundred
    halves the chance to find a gain of 1 %, though it says nothing of either arm (winsorising:
    Dixon, Ann. Math. Statist. 31, 385, 1960; limits by a robust scale: Hampel, J. Am. Statist.
    Assoc. 69, 383, 1974). Both sides have the same limit, whichever arm a stall struck.

    Args:
        processes: the process pair of each. What these differ by is no stall: far is far from the
            median of the own one, by what pairs of one process pair differ by.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    groups = _owned(len(values), processes)
    apart = [np.abs(np.subtract.outer(values[own], values[own])) for own in groups]
    between = np.concatenate([one[np.triu_indices(len(one), 1)] for one in apart])
    limit = FAR_OUT * _APART_TO_SD * float(np.median(between)) if len(between) else 0.0
    if limit <= 0:  # most are equal: nothing says how far is far
        return list(ratios), 0
    moved = values.copy()
    for own in groups:
        middle = np.median(values[own])
        moved[own] = values[own].clip(middle - limit, middle + limit)
    return moved.tolist(), int((moved != values).sum())


def _owned(count: int, processes: Sequence[int] | None) -> list[NDArray[np.bool_]]:
    """Which pairs are of each process pair; all are of one where none is named."""
    import numpy as np

    owner = np.zeros(count, dtype=np.int64) if processes is None else np.asarray(processes)
    return [owner == one for one in dict.fromkeys(owner.tolist())]
