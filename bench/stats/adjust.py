"""Adjustments to the log-ratios of pairs before averaging: order effect and outliers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FAR_OUT = 4.0
"""Winsorising limit in standard deviations from the median. The standard deviation is estimated
from the median distance of two pairs. One normal value in 16,000 lies beyond the limit."""
_DISTANCE_TO_SD = 1 / (math.sqrt(2) * statistics.NormalDist().inv_cdf(0.75))
"""Ratio of a normal standard deviation to the median distance of two values."""


class Ordered(NamedTuple):
    """Log-ratios after removing the order effect."""

    ratios: list[float]
    """Log-ratios of patched over baseline."""
    effect: float | None
    """Log-ratio by which the arm that runs first is faster. None: no process pair has pairs in both
    orders, so nothing was removed."""


def without_order(
    ratios: Sequence[float],
    patched_first: Sequence[bool],
    processes: Sequence[int] | None = None,
) -> Ordered:
    """Remove the order effect, whose sign depends on which arm runs first.

    On a GPU that prefill drove to its power cap, the first window after prefill runs at a lower
    clock than the second. On an H200 this is 0.6 %, where pairs otherwise differ by 0.2 %.
    Alternating orders cancel it in the mean, but it inflates the spread and biases the mean of an
    odd number of pairs. This is the period effect of a crossover trial (Hills and Armitage, Br. J.
    Clin. Pharmacol. 8, 7, 1979). It is estimated by the median of all differences, which is robust
    to stalls (Sen, J. Am. Statist. Assoc. 63, 1379, 1968).

    Args:
        ratios: log-ratios of patched over baseline, one per pair.
        patched_first: for each pair, whether the patched arm ran first.
        processes: the process pair of each pair. Only pairs of the same process pair are compared,
            since a difference between processes is not an order effect.

    Returns:
        The adjusted log-ratios and the effect.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    first = np.asarray(patched_first, dtype=np.bool_)
    differences = [
        np.subtract.outer(values[group & first], values[group & ~first]).ravel()
        for group in _groups(len(values), processes)
    ]
    between = np.concatenate(differences)
    if not len(between):
        return Ordered(list(ratios), None)
    effect = float(np.median(between)) / 2
    return Ordered((values - effect * np.where(first, 1.0, -1.0)).tolist(), effect)


def winsorised(
    ratios: Sequence[float], processes: Sequence[int] | None = None
) -> tuple[list[float], int]:
    """Clip outliers to `FAR_OUT` standard deviations from the median.

    A stall of 20 ms makes a window 7 % slower. One such pair in a hundred halves the chance of
    detecting a gain of 1 %, although it says nothing about either arm. (Winsorising: Dixon, Ann.
    Math. Statist. 31, 385, 1960; limits from a robust scale: Hampel, J. Am. Statist. Assoc. 69,
    383, 1974.) Both sides have the same limit, whichever arm stalled.

    Args:
        ratios: log-ratios of patched over baseline, one per pair.
        processes: the process pair of each pair. The median is taken per process pair and the scale
            within process pairs, since a difference between processes is not a stall.

    Returns:
        The clipped log-ratios and the number of pairs that were clipped.
    """
    import numpy as np

    values = np.asarray(ratios, dtype=np.float64)
    groups = _groups(len(values), processes)
    distances = [np.abs(np.subtract.outer(values[group], values[group])) for group in groups]
    between = np.concatenate([one[np.triu_indices(len(one), 1)] for one in distances])
    limit = FAR_OUT * _DISTANCE_TO_SD * float(np.median(between)) if len(between) else 0.0
    if limit <= 0:  # most values are equal, so the scale is unknown
        return list(ratios), 0
    clipped = values.copy()
    for group in groups:
        middle = np.median(values[group])
        clipped[group] = values[group].clip(middle - limit, middle + limit)
    return clipped.tolist(), int((clipped != values).sum())


def _groups(count: int, processes: Sequence[int] | None) -> list[NDArray[np.bool_]]:
    """A mask of the pairs of each process pair; one mask of all pairs without `processes`."""
    import numpy as np

    owner = np.zeros(count, dtype=np.int64) if processes is None else np.asarray(processes)
    return [owner == process for process in dict.fromkeys(owner.tolist())]
