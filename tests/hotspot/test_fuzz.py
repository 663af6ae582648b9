"""A short slice of fuzzing; fuzz_targets.py runs for hours."""

from __future__ import annotations

import random

import pytest
from fuzz_targets import TARGETS, changed, check, seeds

INPUTS = 150


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_ends_in_a_profile_or_a_usage_error(target: str) -> None:
    content = seeds(target)
    assert content
    draw = random.Random(target)
    for _ in range(INPUTS):
        check(target, changed(target, draw.choice(content), draw))
