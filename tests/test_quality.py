"""Quality on the real gpt-oss-tiny: decode through the cache, kernels wrong at one shape only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from test_measure import TINY

from bench import Quality
from bench.engines import Engine, open_engine
from bench.quality import assess, served_logits

STEPS = 6


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(TINY)


def patched(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A patch of one norm: what it gives is changed."""
    norm: Any = engine.model.get_submodule("model.layers.2.input_layernorm")

    @contextmanager
    def patch() -> Iterator[None]:
        original = norm.forward
        norm.forward = lambda hidden: change(original(hidden))
        try:
            yield
        finally:
            del norm.forward

    return patch


def assessed(engine: Engine, patch: Any) -> Quality:
    return assess(engine, {"baseline": nullcontext, "patched": patch}, 1, STEPS)


def test_served_logits_are_those_of_the_whole_sequence(engine: Engine) -> None:
    prompts = engine.prompts(1)
    picked = engine.generate(prompts, STEPS).tokens
    served = served_logits(engine, prompts, picked)
    whole = engine.logits(torch.cat([prompts, picked], dim=1), STEPS + 2)[:, :-1]
    assert served.shape == (TINY.batch, STEPS + 1, engine.vocab_size)
    assert torch.allclose(served, whole, atol=1e-4)
    assert torch.equal(served.argmax(-1), picked)
    other = served_logits(engine, prompts, picked.roll(1, dims=1))
    assert torch.equal(other[:, 0], served[:, 0])
    assert not torch.allclose(other[:, 1:], served[:, 1:], atol=1e-3)  # tokens are forced
    assert not engine.model._forward_hooks


def test_an_honest_patch_passes_and_the_yardstick_is_the_baselines_error(engine: Engine) -> None:
    same = assessed(engine, patched(engine, lambda hidden: hidden))
    assert same.passed
    assert same.positions == TINY.batch * (STEPS + 1)
    assert same.worst_flip_margin is None
    assert 0 < same.baseline_rmse < 1e-4
    assert "float64" in same.reference


@pytest.mark.parametrize("decode", [True, False])
def test_a_kernel_wrong_at_one_served_shape_fails(engine: Engine, decode: bool) -> None:
    """Right in prefill and wrong in decode, or the other way round: both are served."""

    def change(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.001 if (hidden.shape[1] == 1) is decode else hidden

    found = assessed(engine, patched(engine, change))
    assert not found.passed
    assert "rmse" in found.reason


def test_a_lower_precision_fails(engine: Engine) -> None:
    found = assessed(engine, patched(engine, lambda hidden: hidden.bfloat16().float()))
    assert not found.passed


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_and_survive_json(engine: Engine, value: float) -> None:
    found = assessed(engine, patched(engine, lambda hidden: hidden * value))
    assert not found.passed
    assert "not finite" in found.reason
    assert Quality.model_validate_json(found.model_dump_json()) == found


def test_a_baseline_that_is_not_finite_is_no_yardstick(engine: Engine) -> None:
    broken = patched(engine, lambda hidden: hidden * math.nan)
    found = assess(engine, {"baseline": broken, "patched": broken}, 1, STEPS)
    assert not found.passed


def test_the_reference_puts_back_a_forward_of_the_instances_own(engine: Engine) -> None:
    norm: Any = engine.model.get_submodule("model.layers.2.input_layernorm")
    original = norm.forward

    def own(hidden: torch.Tensor) -> torch.Tensor:
        return original(hidden)

    norm.forward = own
    try:
        engine.reference_logits(engine.prompts(1))
        assert norm.forward is own
    finally:
        del norm.forward
    engine.reference_logits(engine.prompts(1))
    assert "forward" not in norm.__dict__
