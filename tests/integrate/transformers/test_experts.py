"""The role of whole experts in models of many kinds: those of silu(gate) * up, and no others."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers import integrations
from transformers_sample import inside, original_kernel, reference_kernel

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import full_config
from patcher.integrate.layers import LayerSurvey, StepCalls
from patcher.integrate.places import calls_in_step
from patcher.integrate.transformers.parts import kind_of
from patcher.integrate.transformers.places import of_model
from patcher.integrate.transformers.roles.experts_modules import are_experts, some_calls
from patcher.integrate.transformers.roles.experts_whole import ExpertsWhole

moe: Any = integrations.moe  # it is not typed

TAKEN = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "minimax"), 2),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "phimoe", "flex_olmo"), 2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_linear"), 1),
}
"""Layers with experts in a small model."""
OTHERS = {
    "gpt_oss": "; 2: it has biases",
    "aria_text": "; 2: its weights lie the other way",
    "nemotron_h": "; 1: it has no gate",
    "deepseek_v4": "; 4: between its matmuls it also computes clamp",
    "llama4_text": "; 1: Llama4TextExperts has a forward of its own",
    "llama": "",
}


def experts_of(model: Any) -> list[Any]:
    return [each for each in model.modules() if are_experts(each)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TAKEN)
def test_all_experts_of_a_model_run_the_kernel(kind: str, dtype: torch.dtype) -> None:
    model = built(kind, dtype)
    point = ExpertsWhole(model)
    assert point.find() == f"{TAKEN[kind]} instances in {type(model).__name__}"
    book, error = run_in(model, point, reference_kernel("experts"))
    assert (book.calls.total(), dict(book.reasons)) == (TAKEN[kind], {})
    assert book.layers == LayerSurvey(taken=TAKEN[kind])
    assert error < (1e-5 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize(("kind", "said"), OTHERS.items())
def test_experts_that_compute_something_else_stay_and_are_told(kind: str, said: str) -> None:
    with pytest.raises(VerificationError, match="has no experts module of silu") as caught:
        ExpertsWhole(built(kind)).find()
    assert caught.value.message.endswith(f"without biases{said}")


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
@torch.inference_mode()
def test_an_implementation_chosen_later_gives_way_as_well(name: str) -> None:
    model = built("qwen3_moe")
    expected = model(TOKENS).logits
    with inside(ExpertsWhole(model), reference_kernel("experts")) as book:
        model.set_experts_implementation(name)
        during = model(TOKENS).logits
    assert (book.calls.total(), book.reasons.total()) == (2, 0)
    assert torch.allclose(during, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_an_implementation_of_other_code_runs_and_is_told() -> None:
    model = built("mixtral")
    moe.ALL_EXPERTS_FUNCTIONS["mine"] = lambda self, hidden, *rest: torch.zeros_like(hidden)
    [experts, _] = experts_of(model)
    try:
        with inside(ExpertsWhole(model), original_kernel("experts")) as book:
            experts.config._experts_implementation = "mine"
            assert experts(*some_calls(experts)).eq(0).all()
    finally:
        moe.ALL_EXPERTS_FUNCTIONS._global_mapping.pop("mine", None)
        moe.ALL_EXPERTS_FUNCTIONS._local_mapping.pop("mine", None)
    assert dict(book.reasons) == {"experts implementation mine": 1}


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(*args: torch.Tensor) -> None:
        args[-1].fill_(0.25)

    model = built("qwen3_moe")
    monkeypatch.setattr(ExpertsWhole, "original", staticmethod(same))
    with inside(ExpertsWhole(model), original_kernel("experts")):
        [experts, _] = experts_of(model)
        assert experts(*some_calls(experts)).eq(0.25).all()


@torch.inference_mode()
def test_more_rows_run_the_models_own() -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    hidden, chosen, gains = (each.repeat(30, 1) for each in some_calls(experts))
    expected = experts(hidden, chosen, gains)
    with inside(ExpertsWhole(model), reference_kernel("experts")) as book:
        assert experts(hidden, chosen, gains).equal(expected)
    assert dict(book.reasons) == {"tokens above 64": 1}


def limited(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=1000.0)) * up


def swapped(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    up, gate = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def beside(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return self.act_fn(gate) * up


def widened(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (limited, "between its matmuls it also computes clamp"),
        (swapped, "between its matmuls is not silu(gate) * up"),
        (beside, "between its matmuls is not silu(gate) * up"),
        (widened, None),
    ],
)
def test_what_is_between_the_matmuls_decides(between: Any, said: str | None) -> None:
    """A clamp far beyond what is tried shows as an operator, not in numbers."""
    model = built("mixtral")
    experts = experts_of(model)[1]
    experts.__class__ = type("Mine", (type(experts),), {"_apply_gate": between})
    with inside(ExpertsWhole(model), original_kernel("experts")) as book:
        assert book.layers is not None
        assert dict(book.layers.refused) == ({} if said is None else {said: 1})


def without_a_field(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@torch.inference_mode()
def test_an_activation_without_a_field_is_taken_where_all_functions_run() -> None:
    model = built("mixtral")
    expected = model(TOKENS).logits
    for number, experts in enumerate(experts_of(model)):
        parts: dict[str, Any] = {"_apply_gate": without_a_field}
        if not number:  # `eager` runs without the field, too
            own = type("Own", (type(experts),), {"forward": eager_of_own, **parts})
            parts["forward"] = moe.use_experts_implementation(own).forward
        experts.__class__ = type("Mine", (type(experts),), parts)
        del experts.act_fn
    with inside(ExpertsWhole(model), reference_kernel("experts")) as book:
        assert book.layers is not None
        [(said, _)] = book.layers.refused.items()
        assert said.startswith("it cannot be tried alone: ")
        assert torch.allclose(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    assert book.calls.total() == 1


def eager_of_own(self: Any, hidden: torch.Tensor, chosen: Any, gains: Any) -> torch.Tensor:
    found = torch.zeros_like(hidden)
    for token, choice in torch.cartesian_prod(*map(torch.arange, chosen.shape)).tolist():
        expert = chosen[token, choice]
        inner = self._apply_gate(self.gate_up_proj[expert] @ hidden[token])
        found[token] += gains[token, choice] * (self.down_proj[expert] @ inner)
    return found


@torch.inference_mode()
def test_gradients_autocast_hooks_and_changes_run_the_models_own() -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    given = some_calls(experts)
    expected = experts(*given)
    seen: list[Any] = []
    with inside(ExpertsWhole(model), original_kernel("experts")) as book:
        with torch.inference_mode(False):
            experts(*(each.clone() for each in given))
        with torch.autocast("cpu", torch.bfloat16):
            experts(*given)
        hook = experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
        assert experts(*given).equal(expected)
        hook.remove()
        own, experts.act_fn = experts.act_fn, torch.nn.ReLU()
        assert not torch.allclose(experts(*given), expected)
        experts.act_fn = own
        experts.limit = None
        assert book.calls.total() == 0
        experts(*given)
        experts.has_bias, experts.gate_up_proj_bias = True, torch.ones(4, 256)
        experts.down_proj_bias = torch.ones(4, 64)
        assert not torch.allclose(experts(*given), expected)
    assert seen
    assert book.calls.total() == 1
    assert dict(book.reasons) == {
        "gradients are on": 1,
        "autocast is on": 1,
        "a module has hooks": 1,
        "the activation was replaced": 1,
        "its settings were changed": 1,
    }


@pytest.mark.parametrize("of", ["module", "class"])
@torch.inference_mode()
def test_what_is_put_between_the_matmuls_later_is_what_runs(
    of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    given = some_calls(experts)
    with inside(ExpertsWhole(model), original_kernel("experts")) as book:
        before = experts(*given)
        if of == "module":
            experts._apply_gate = partial(swapped, experts)
        else:
            monkeypatch.setattr(kind_of(experts), "_apply_gate", swapped)
        during = experts(*given)
    assert during.equal(experts(*given))
    assert not torch.allclose(during, before)
    assert dict(book.reasons) == {"the activation was replaced": 1}


@torch.inference_mode()
def test_a_model_that_gets_another_dtype_later_gives_what_it_gives_alone() -> None:
    model = built("mixtral")
    with inside(ExpertsWhole(model), reference_kernel("experts")) as book:
        model.bfloat16()
        during = model(TOKENS).logits
    assert torch.allclose(during, model(TOKENS).logits, rtol=0.1, atol=0.02)
    assert (book.calls.total(), book.reasons.total()) == (2, 0)


@torch.inference_mode()
def test_choices_of_other_ranks_add_nothing() -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    hidden, chosen, gains = some_calls(experts)
    for each in experts_of(model):
        each._is_expert_parallel = True
    chosen[0, 1] = chosen[2, 0] = experts.num_experts
    gains[0, 1] = gains[2, 0] = 0.0
    expected = experts(hidden, chosen, gains)
    for kernel in (original_kernel("experts"), reference_kernel("experts")):
        with inside(ExpertsWhole(model), kernel) as book:
            during = experts(hidden, chosen, gains)
        assert (book.calls.total(), book.reasons.total()) == (1, 0)
        assert torch.allclose(during, expected, rtol=1e-5, atol=1e-7)


@torch.inference_mode()
def test_compiled_code_runs_the_kernel() -> None:
    model = built("mixtral")
    [experts, _] = experts_of(model)
    before = experts(*(given := some_calls(experts)))
    with inside(ExpertsWhole(model), original_kernel("experts")) as book:
        during = torch.compile(experts, backend="eager", fullgraph=True)(*given)
        assert book.calls.total() == 1
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-6)


@torch.inference_mode()
def test_copies_of_a_patched_model_run_their_own() -> None:
    model = built("mixtral")
    expected = model(TOKENS).logits
    with inside(ExpertsWhole(model), original_kernel("experts")):
        assert copy.deepcopy(model)(TOKENS).logits.equal(expected)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "granitemoehybrid", *OTHERS])
def test_a_config_tells_of_the_role(kind: str, tmp_path: Any) -> None:
    config = built(kind).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    told = full_config(str(tmp_path))
    if kind in TAKEN:
        assert of_model("experts", lambda: told).startswith(f"{kind} has ")
        assert calls_in_step("transformers", "experts", told) == StepCalls(TAKEN[kind])
    else:
        with pytest.raises(
            VerificationError, match=f"no experts of {kind} in transformers compute"
        ):
            of_model("experts", lambda: told)
