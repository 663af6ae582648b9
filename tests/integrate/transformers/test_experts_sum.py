"""The role of the experts' sum, in models of many kinds: `moe_reduce` after transformers' rows."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers import integrations
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers_sample import inside, original_kernel, reference_kernel

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import full_config
from patcher.integrate.layers import LayerSurvey, StepCalls
from patcher.integrate.places import calls_in_step
from patcher.integrate.transformers.places import of_model
from patcher.integrate.transformers.roles.experts_modules import are_experts, some_calls
from patcher.integrate.transformers.roles.experts_sum import ExpertsSums

moe: Any = integrations.moe  # it is not typed

SUMS = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "minimax"), 2),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "phimoe", "flex_olmo"), 2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear"), 1),
    "gpt_oss": 2,  # biases, and weights that lie the other way
    "aria_text": 2,  # such weights without biases
    "nemotron_h": 1,  # no gate
    "deepseek_v4": 4,  # a clamp
}
"""Layers with experts in a small model."""
OTHERS = {
    "llama4_text": "; 1: Llama4TextExperts has a forward of its own",
    "llama": "",
}


def experts_of(model: Any) -> list[Any]:
    return [each for each in model.modules() if are_experts(each)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SUMS)
def test_every_sum_of_a_model_runs_the_kernel(kind: str, dtype: torch.dtype) -> None:
    model = built(kind, dtype)
    point = ExpertsSums(model)
    assert point.find() == f"{SUMS[kind]} instances in {type(model).__name__}"
    book, error = run_in(model, point, reference_kernel("experts.sum"))
    assert (book.calls.total(), dict(book.reasons)) == (SUMS[kind], {})
    assert book.layers == LayerSurvey(taken=SUMS[kind])
    assert error < (1e-5 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h", "aria_text"])
@torch.inference_mode()
def test_an_implementation_chosen_later_runs_the_kernel(kind: str, name: str) -> None:
    model = built(kind)
    expected = model(TOKENS).logits
    with inside(ExpertsSums(model), original_kernel("experts.sum")) as book:
        model.set_experts_implementation(name)
        during = model(TOKENS).logits
        model.set_experts_implementation("eager")
        model(TOKENS)
    assert book.calls.total() == SUMS[kind]
    assert dict(book.reasons) == {"experts implementation eager": SUMS[kind]}
    assert torch.allclose(during, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero(rows: Any, row_map: Any, scales: Any, output: torch.Tensor) -> None:
        output.fill_(0.25)

    model = built("qwen3_moe")
    monkeypatch.setattr(ExpertsSums, "original", staticmethod(zero))
    with inside(ExpertsSums(model), original_kernel("experts.sum")):
        [experts, _] = experts_of(model)
        assert experts(*some_calls(experts)).eq(0.25).all()


@pytest.mark.parametrize(("kind", "said"), OTHERS.items())
def test_experts_of_another_kind_stay_and_are_told(kind: str, said: str) -> None:
    with pytest.raises(VerificationError, match="has no experts module that") as caught:
        ExpertsSums(built(kind)).find()
    assert caught.value.message.endswith(f"batched_mm runs{said}")


@torch.inference_mode()
def test_experts_in_fp8_are_told_beside_others() -> None:
    model = built("mixtral")
    quantised = FP8Experts(model.config, block_size=(32, 32))
    own = moe.use_experts_implementation(
        type("Own", (MixtralExperts,), {"forward": lambda self, *a: a[0]}),
        experts_interface=moe.ExpertsInterface(),
    )
    model.model.layers[0].mlp.experts = quantised
    model.model.layers[0].mlp.others = own(model.config)
    told = {
        "its weights are quantised (float8_e4m3fn)": 1,
        "Own has functions of its own": 1,
    }
    point = ExpertsSums(model)
    point.install(kernel := original_kernel("experts.sum"))
    assert kernel.book.layers == LayerSurvey(1, Counter(told))
    point.remove()


def test_functions_of_other_code_are_refused_and_later_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(self: Any, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.zeros_like(hidden)

    model = built("mixtral")
    [experts, _] = experts_of(model)
    functions = moe.ALL_EXPERTS_FUNCTIONS
    with inside(ExpertsSums(model), original_kernel("experts.sum")) as book, torch.no_grad():
        functions["grouped_mm"] = mine
        try:
            assert experts(*some_calls(experts)).eq(0).all(), "the other code runs"
            with pytest.raises(VerificationError, match="registered by other code"):
                ExpertsSums(built("mixtral")).find()
        finally:
            del functions["grouped_mm"]
        assert experts(*some_calls(experts)).ne(0).any()
    assert dict(book.reasons) == {"the experts function grouped_mm was registered by other code": 1}
    assert book.calls.total() == 1


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@torch.inference_mode()
def test_choices_of_other_ranks_add_nothing(kind: str, name: str) -> None:
    """As expert parallelism gives them: an expert beyond those of the rank, with weight 0."""
    model = built(kind)
    model.set_experts_implementation(name)
    [experts, _] = experts_of(model)
    hidden, chosen, gains = some_calls(experts)
    for each in experts_of(model):
        each._is_expert_parallel = True
    chosen[0, 1] = chosen[2, 0] = experts.num_experts
    gains[0, 1] = gains[2, 0] = 0.0
    expected = experts(hidden, chosen, gains)
    for kernel in (original_kernel("experts.sum"), reference_kernel("experts.sum")):
        with inside(ExpertsSums(model), kernel) as book:
            during = experts(hidden, chosen, gains)
        assert (book.calls.total(), book.reasons.total()) == (1, 0)
        assert torch.allclose(during, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
@torch.inference_mode()
def test_no_tokens_give_no_rows(name: str) -> None:
    model = built("mixtral")
    model.set_experts_implementation(name)
    [experts, _] = experts_of(model)
    none = tuple(each[:0] for each in some_calls(experts))
    expected = experts(*none)
    for kernel in (original_kernel("experts.sum"), reference_kernel("experts.sum")):
        with inside(ExpertsSums(model), kernel) as book:
            assert experts(*none).shape == expected.shape == (0, 64)
        assert book.calls.total() + book.reasons.total() == 1


def test_gradients_autocast_and_parametrised_weights_run_the_models_own() -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    given = some_calls(experts)
    with inside(ExpertsSums(model), original_kernel("experts.sum")) as book:
        assert experts(*given).requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            experts(*given)
        torch.nn.utils.parametrize.register_parametrization(
            experts, "down_proj", torch.nn.Identity()
        )
        with torch.no_grad():
            experts(*given)
        torch.nn.utils.parametrize.remove_parametrizations(experts, "down_proj")
        with torch.no_grad():
            experts(*given)
    assert dict(book.reasons) == {
        "gradients are on": 1,
        "autocast is on": 1,
        "experts' weights are parametrised": 1,
    }
    assert book.calls.total() == 1


@torch.inference_mode()
def test_a_model_that_gets_another_dtype_later_gives_what_it_gives_alone() -> None:
    model = built("mixtral")
    with inside(ExpertsSums(model), original_kernel("experts.sum")) as book:
        model.bfloat16()
        during = model(TOKENS).logits
    assert during.equal(model(TOKENS).logits)
    assert book.calls.total() + book.reasons.total() == 2


@torch.inference_mode()
def test_hooks_see_what_they_saw() -> None:
    model = built("mixtral")
    seen: list[torch.Tensor] = []
    for part in (experts_of(model)[0], experts_of(model)[0].act_fn):
        part.register_forward_hook(lambda m, args, output: seen.append(output.clone()))
    model(TOKENS)
    with inside(ExpertsSums(model), original_kernel("experts.sum")):
        model(TOKENS)
    assert len(seen) == 4
    assert all(map(torch.equal, seen[:2], seen[2:]))


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
@torch.inference_mode()
def test_compiled_code_runs_the_kernel(name: str) -> None:
    model = built("mixtral", torch.bfloat16)
    model.set_experts_implementation(name)
    [experts, _] = experts_of(model)
    before = experts(*(given := some_calls(experts)))
    with inside(ExpertsSums(model), original_kernel("experts.sum")) as book:
        during = torch.compile(experts, backend="eager", fullgraph=True)(*given)
        assert book.calls.total() == 1
    assert torch.allclose(during, before, rtol=1e-2, atol=1e-3)


@torch.inference_mode()
def test_copies_of_a_patched_model_run_their_own() -> None:
    model = built("mixtral")
    expected = model(TOKENS).logits
    with inside(ExpertsSums(model), original_kernel("experts.sum")):
        copied = copy.deepcopy(model)
        assert copied(TOKENS).logits.equal(expected)
    assert not any("patch_point" in vars(type(each)) for each in copied.modules())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "llama4_text"])
def test_a_config_tells_of_the_role(kind: str, tmp_path: Any) -> None:
    config = built(kind).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    told = full_config(str(tmp_path))
    if kind in SUMS:
        assert of_model("experts.sum", lambda: told).startswith(f"{kind} has ")
        assert calls_in_step("transformers", "experts.sum", told) == StepCalls(SUMS[kind])
    else:
        with pytest.raises(VerificationError, match=f"no experts of {kind} in transformers are"):
            of_model("experts.sum", lambda: told)


def test_experts_that_are_loaded_quantised_are_not_promised(tmp_path: Any) -> None:
    config = built("mixtral").config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    told = {**full_config(str(tmp_path)), "quantization_config": {"quant_method": "fp8"}}
    said = of_model("experts.sum", lambda: told)
    assert said.endswith("layers of experts.sum, without those that are loaded quantised (fp8)")
    assert calls_in_step("transformers", "experts.sum", told) is None


def test_a_dense_model_of_a_file_with_experts_has_none(tmp_path: Any) -> None:
    config = built("qwen3_moe", mlp_only_layers=[0, 1]).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with pytest.raises(VerificationError, match="no experts of qwen3_moe"):
        of_model("experts.sum", lambda: full_config(str(tmp_path)))
