"""What holds for each point that takes modules of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.experts_modules import are_experts

each_point = pytest.mark.parametrize("point", ["experts", "experts.sum"])


@pytest.mark.parametrize(
    ("kind", "names"),
    [("mixtral", ("experts", "experts.sum")), ("gpt_oss", ("gpt_oss.experts", "experts.sum"))],
)
def test_two_patches_of_one_module_exclude_each_other(kind: str, names: tuple[str, str]) -> None:
    model = built(kind)
    [own] = {type(each).__name__ for each in model.modules() if are_experts(each)}
    for one, other in (names, names[::-1]):
        first, second = (POINTS[name](model) for name in (one, other))
        with (
            inside(first, original_kernel(one)),
            pytest.raises(VerificationError, match=f"{own} is already patched"),
        ):
            second.find()
        assert second.find()


@each_point
def test_a_spread_model_is_refused(point: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    model = built("mixtral")
    experts = next(filter(are_experts, model.modules()))
    accelerate.hooks.add_hook_to_module(experts, accelerate.hooks.ModelHook())
    with pytest.raises(VerificationError, match="replaced by a hook of accelerate"):
        POINTS[point](model).find()
    with pytest.raises(VerificationError, match="no experts module whose weights are in memory"):
        POINTS[point](built("mixtral").to("meta")).find()


@each_point
@torch.inference_mode()
def test_adapters_of_weights_count(point: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"])
    for later in (False, True):
        own = built("mixtral")
        adapted = None if later else peft.get_peft_model(own, config).eval()
        with inside(POINTS[point](own), original_kernel(point)) as book:
            adapted = adapted or peft.get_peft_model(own, config).eval()
            torch.manual_seed(1)
            for name, parameter in adapted.named_parameters():
                if "lora" in name:
                    parameter.data.uniform_(0.1, 0.3)
            during = adapted(TOKENS).logits
        assert dict(book.reasons) == {"experts' weights are parametrised": 2}
        assert during.equal(adapted(TOKENS).logits)
