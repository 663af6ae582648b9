"""What passes of a model that is spread over GPUs; the models need two of them."""

from __future__ import annotations

from typing import Any

import pytest

from patcher.bench.lab.transformers_devices import passed

RAN = {"calls": 72, "largest_difference": 0.1, "largest_logit": 5.0, "as_before": True}
REFUSED = {"refused": "GptOssDecoderLayer.forward was replaced", "as_before": True}


@pytest.mark.parametrize(
    ("one", "spread", "good"),
    [
        (RAN, REFUSED, True),
        (RAN, RAN, True),
        (REFUSED, REFUSED, False),
        ({**RAN, "calls": 0}, RAN, False),
        (RAN, {**RAN, "largest_difference": 1.0}, False),
        (RAN, {**REFUSED, "as_before": False}, False),
    ],
)
def test_a_patch_has_to_run_on_one_gpu_and_do_no_harm_on_two(
    one: dict[str, Any], spread: dict[str, Any], good: bool
) -> None:
    assert passed({"one GPU": one, "by hand": spread}) is good
