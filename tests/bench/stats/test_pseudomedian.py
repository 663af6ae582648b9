"""The middle of a few measurements, some of them far off."""

from __future__ import annotations

import math
import random

import pytest

from patcher.bench.stats.hodges_lehmann import hodges_lehmann


def test_known_values() -> None:
    """Hollander and Wolfe's depression scores (example 3.1): estimate -0.46, 96.1 % interval
    [-0.786, -0.010]."""
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    found = hodges_lehmann([b - a for a, b in zip(before, after, strict=True)], 0.95)
    assert found.middle == pytest.approx(-0.46)
    assert (found.low, found.high) == pytest.approx((-0.786, -0.010))


def test_the_interval_holds_as_often_as_it_says() -> None:
    draw = random.Random(3)
    for pairs in (6, 12, 24):
        held = 0
        for _ in range(1500):
            found = hodges_lehmann([draw.gauss(0.2, 0.05) for _ in range(pairs)])
            held += found.low <= 0.2 <= found.high
        assert 0.935 * 1500 <= held <= 0.985 * 1500


def test_pairs_far_off_move_it_little() -> None:
    draw = random.Random(4)
    values = [draw.gauss(0.0, 0.01) for _ in range(12)]
    spoilt = [6.0, 5.5, *values[2:]]
    assert abs(hodges_lehmann(spoilt).middle) < 0.02
    assert abs(sum(spoilt) / 12) > 0.5


def test_few_values_are_not_taken_for_certain() -> None:
    """Ranks of two to five values would say 50 to 94 %."""
    one = hodges_lehmann([1.0])
    assert (one.low, one.middle, one.high) == (-math.inf, 1.0, math.inf)
    four = hodges_lehmann([1.0, 2.0, 3.0, 4.0])
    assert four.middle == 2.5
    assert four.half_width == pytest.approx(2.054, abs=1e-3)  # Student's, three degrees of freedom
    assert hodges_lehmann([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).low == 1.0
    with pytest.raises(ValueError, match="no values"):
        hodges_lehmann([])
