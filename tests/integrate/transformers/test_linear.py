"""The role of a linear layer in models of many kinds: PyTorch's own forward, nothing else's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import accelerate
import peft
import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.integrate.layers import LayerSurvey, StepCalls
from patcher.integrate.transformers.places import calls_in_step, of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.linear import Linears

LINEARS = {"llama": 15, "qwen2": 15, "qwen3": 15, "mixtral": 9, "gemma3_text": 15, "phi3": 9}
LINEARS |= {"olmo2": 15, "gpt_oss": 9, "deepseek_v3": 17, "mamba2": 5, "opt": 13, "gpt2": 1}


@pytest.mark.parametrize(("kind", "count"), LINEARS.items())
def test_every_linear_layer_of_a_model_runs_the_kernel(kind: str, count: int) -> None:
    model = built(kind)
    point = Linears(model)
    assert point.find() == f"{count} instances in {type(model).__name__}"
    book, error = run_in(model, point)
    assert (book.calls.total(), book.reasons.total()) == (count, 0)
    assert book.layers == LayerSurvey(taken=count)
    assert error < 1e-5


def test_in_bfloat16_too() -> None:
    book, error = run_in(model := built("qwen2", torch.bfloat16), Linears(model))
    assert (book.calls.total(), book.reasons.total()) == (15, 0)
    assert error < 2e-2


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    monkeypatch.setattr(Linears, "original", staticmethod(lambda x, w, b, out: out.fill_(7)))
    with inside(Linears(model), original_kernel("linear")):
        assert model.lm_head(torch.ones(2, 64)).eq(7).all()


@torch.inference_mode()
def test_more_rows_than_the_kernel_is_for_run_the_models_own() -> None:
    model = built("llama")
    with inside(Linears(model), original_kernel("linear", bounded=True)) as book:
        model(torch.arange(65).view(1, 65))
        assert dict(book.reasons) == {"tokens above 64": 15}
        model(TOKENS)
    assert book.calls.total() == 15


@torch.inference_mode()
def test_layers_too_narrow_for_the_kernel_are_told_before_they_are_called() -> None:
    model = built("qwen3_next")
    with inside(Linears(model), original_kernel("linear", bounded=True)) as book:
        model(TOKENS)
    narrow = {"outer no multiple of 8": 2}  # the gates of its shared experts
    assert book.layers is not None
    assert dict(book.layers.refused) == dict(book.reasons) == narrow


class Squared(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square()


class Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def another_forward(linear: Any) -> None:
    linear.__class__ = Squared


def parametrised(linear: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved())


def quantised(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.data.to(torch.int8), requires_grad=False)


def in_float8(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.data.to(torch.float8_e4m3fn), False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_forward, "Squared has a forward of its own"),
        (parametrised, "its weight is parametrised"),
        (quantised, "its weight is quantised (int8)"),
        (in_float8, "its weight is quantised (float8_e4m3fn)"),
    ],
)
def test_a_layer_that_was_changed_keeps_its_own_and_is_told(change: Any, said: str) -> None:
    model = built("llama")
    change(model.model.layers[0].mlp.up_proj)
    with inside(Linears(model), original_kernel("linear")) as book:
        assert book.layers == LayerSurvey(14, Counter({said: 1}))
        kind = type(model.model.layers[0].mlp.up_proj)
        assert "patch_point" not in vars(kind)
    others = [each for each in model.modules() if type(each) is torch.nn.Linear]
    for layer in others:
        change(layer)
    with pytest.raises(VerificationError, match="has no linear layer of torch") as caught:
        Linears(model).find()
    assert caught.value.message.endswith(f"; 15: {said}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_of_modules_that_quantise_are_no_linear_layers() -> None:
    model = torch.ao.quantization.quantize_dynamic(built("llama"), {torch.nn.Linear})
    with pytest.raises(VerificationError, match="has no linear layer"):
        Linears(model).find()


@torch.inference_mode()
def test_what_an_adapter_holds_keeps_its_own_and_the_adapter_counts() -> None:
    model = built("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data.uniform_(0.1, 0.3)
    before = adapted(TOKENS).logits
    with inside(Linears(adapted), original_kernel("linear")) as book:
        during = adapted(TOKENS).logits
    # each of two layers: the projection, and the adapter's own two
    assert book.layers == LayerSurvey(13, Counter({"an adapter holds it": 6}))
    assert (book.calls.total(), book.reasons.total()) == (13, 0)
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert adapted(TOKENS).logits.equal(before)


@torch.inference_mode()
def test_an_adapter_that_comes_later_counts() -> None:
    model = built("llama")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    expected = peft.get_peft_model(copy.deepcopy(model), config).eval()(TOKENS).logits
    torch.manual_seed(1)
    with inside(Linears(model), original_kernel("linear")) as book:
        adapted = peft.get_peft_model(model, config).eval()
        assert torch.allclose(adapted(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
        assert book.calls.total() == 15, "an adapter calls the layer that it holds"


def test_layers_that_accelerate_moves_are_refused() -> None:
    model = built("llama")
    accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.ModelHook())
    with pytest.raises(VerificationError, match="was replaced by a hook of accelerate"):
        Linears(model).find()


@torch.inference_mode()
def test_hooks_see_what_they_saw_and_may_change_it() -> None:
    model = built("llama")
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda m, args, output: seen.append(output) or output * 2)
    before = model(TOKENS).logits
    with inside(Linears(model), original_kernel("linear")):
        during = model(TOKENS).logits
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert torch.allclose(seen[1] * 2, during)


def test_gradients_strides_and_autocast_run_the_models_own() -> None:
    model = built("llama")
    x = torch.randn(4, 64)
    with inside(Linears(model), original_kernel("linear")) as book:
        assert model.lm_head(x).requires_grad
        with torch.no_grad():
            model.lm_head(torch.randn(64, 4).T)
            with torch.autocast("cpu", torch.bfloat16):
                assert model.lm_head(x).dtype == torch.bfloat16
    assert dict(book.reasons) == {"gradients are on": 1, "not contiguous": 1, "autocast is on": 1}


def test_without_weights_in_memory_it_is_refused() -> None:
    with pytest.raises(VerificationError, match="has no linear layer whose weights are in memory"):
        Linears(built("llama").to("meta")).find()


@torch.inference_mode()
def test_compiled_code_runs_the_kernel() -> None:
    model = built("llama")
    before = model.lm_head(x := torch.randn(4, 64))
    with inside(Linears(model), original_kernel("linear")) as book:
        during = torch.compile(model.lm_head, backend="eager", fullgraph=True)(x)
        assert book.calls.total() == 1
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)


def test_a_config_tells_of_the_role() -> None:
    assert POINTS["linear"] is Linears
    assert of_model("linear", lambda: {"model_type": "llama"}) == "llama has layers of linear"


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "fp8", "mxfp4", None])
def test_layers_that_are_loaded_quantised_are_not_promised(method: str | None) -> None:
    config = {"model_type": "llama", **built("llama").config.to_dict()}
    if method is not None:
        config["quantization_config"] = {"quant_method": method}
    said, calls = of_model("linear", lambda: config), calls_in_step("linear", config)
    if method in ("mxfp4", None):
        assert (said, calls) == ("llama has layers of linear", StepCalls(15))
    else:
        assert said.endswith(f"linear, without those that are loaded quantised ({method})")
        assert calls is None
    assert calls_in_step("rotation", config) == StepCalls(2)
