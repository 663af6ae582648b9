"""Whose function an attribute is: the engine's own, or one that others put in its place."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from patcher.bench import VerificationError
from patcher.integrate.swap import AttributePatch


def owner(function: Any) -> Any:
    return SimpleNamespace(__name__="Runner", step=function)


def engines_step() -> Any:
    module = ModuleType("vllm.runner")
    exec(compile("def step(): return 1", "/site-packages/vllm/runner.py", "exec"), vars(module))
    return module.step


def other_step() -> int:
    return 2


@pytest.mark.parametrize("decorate", [lambda step: step, torch.inference_mode(), torch.no_grad()])
def test_a_function_that_pytorch_decorates_is_whose_it_was(decorate: Any) -> None:
    AttributePatch(owner(decorate(engines_step())), "step").must_be_the_engines()
    with pytest.raises(VerificationError, match=r"Runner\.step is already patched"):
        AttributePatch(owner(decorate(other_step)), "step").must_be_the_engines()


def test_what_wraps_the_engines_function_by_its_name_is_not_it() -> None:
    @functools.wraps(engines_step())
    def wrapper() -> int:
        return 3

    with pytest.raises(VerificationError, match=r"Runner\.step is already patched"):
        AttributePatch(owner(wrapper), "step").must_be_the_engines()
