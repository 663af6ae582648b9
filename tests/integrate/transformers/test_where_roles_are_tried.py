"""Where the program is in a mode of torch when a patch is put in, parts are tried as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built
from transformers_sample import original_kernel

from patcher.integrate.transformers.points import POINTS

COUNTS = {"norm": 5, "add_norm": 4, "linear": 9, "router": 2, "rotation": 2}


@contextmanager
def made_in(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "bfloat16": lambda: made_in(torch.bfloat16),
    "float64": lambda: made_in(torch.float64),
    "another device": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COUNTS)
def test_a_patch_put_in_within_a_mode_is_that_put_in_without(name: str, mode: str) -> None:
    model = built("mixtral")
    with torch.inference_mode():
        before = model(TOKENS).logits
    point: Any = POINTS[name](model)
    with MODES[mode]():
        point.install(kernel := original_kernel(name))
    with torch.inference_mode():
        during = model(TOKENS).logits
    point.remove()
    assert (kernel.book.calls.total(), kernel.book.reasons.total()) == (COUNTS[name], 0)
    assert torch.allclose(during, before, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        assert model(TOKENS).logits.equal(before)
