"""The role of a router, in models of many kinds: softmax over the chosen logits, and no other."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import full_config
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.transformers.places import of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.topk_router import Recipe, Routers, recipe_of

SUM = {"norm_topk_prob": True}
"""Scores are divided by their sum, which some architectures leave to a setting."""
SUMMED = ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo")
ROUTED: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("mixtral", "minimax", "gpt_oss", "aria_text", "cohere2_moe")},
    **{kind: {} for kind in ("granitemoe", "granitemoeshared", "granitemoehybrid")},
    **dict.fromkeys(SUMMED, SUM),
}
OTHERS = {
    "deepseek_v2": "1: it also computes mul",
    "deepseek_v3": "1: it also computes sigmoid",
    "glm4_moe": "1: it also computes sigmoid",
    "llama4_text": "1: it also computes full_like",
    "phimoe": "2: it also computes max",
    "qwen2_moe": "2: its scores are not the softmax over the chosen logits",
    "olmoe": "2: its scores are not the softmax over the chosen logits",
    "llama": "",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ROUTED)
def test_every_router_of_a_model_runs_the_kernel(kind: str, dtype: torch.dtype) -> None:
    model = built(kind, dtype, **ROUTED[kind])
    point = Routers(model)
    assert point.find() == f"2 instances in {type(model).__name__}"
    book, error = run_in(model, point)
    assert (book.calls.total(), book.reasons.total()) == (2, 0)
    assert book.layers == LayerSurvey(taken=2)
    assert error < (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "qwen3_moe"])
@torch.inference_mode()
def test_dtypes_and_shapes_are_those_of_the_model(kind: str) -> None:
    model = built(kind, torch.bfloat16, **ROUTED[kind])
    router = next(each for each in model.modules() if Routers(model).of_role(each))
    own = router(rows := torch.randn(5, 64, dtype=torch.bfloat16))
    with inside(Routers(model), original_kernel("router")):
        ours = router(rows)
    for one, other in zip(own, ours, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert own[0].equal(ours[0]), "the matmul is the model's own"


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def last(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
        scores.fill_(0.5)
        experts.copy_(torch.tensor([2, 3]))

    model = built("mixtral")
    monkeypatch.setattr(Routers, "original", staticmethod(last))
    with inside(Routers(model), original_kernel("router")):
        _, scores, experts = model.model.layers[0].mlp.gate(torch.ones(2, 64))
    assert scores.eq(0.5).all()
    assert experts.tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize(("kind", "said"), OTHERS.items())
def test_routers_that_choose_or_weigh_otherwise_stay_and_are_told(kind: str, said: str) -> None:
    with pytest.raises(VerificationError, match="has no router whose scores are") as caught:
        Routers(built(kind)).find()
    assert caught.value.message.endswith(f"; {said}" if said else "over the chosen logits")


def clamped(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight).clamp(-100, 100)
    values, chosen = logits.topk(self.top_k, dim=-1)
    return logits, values.softmax(-1), chosen


def halved(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    values, chosen = logits.topk(self.top_k, dim=-1)
    return logits, values.softmax(-1) / 2, chosen


def least(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    values, chosen = logits.topk(self.top_k, dim=-1, largest=False)
    return logits, values.softmax(-1), chosen


def of_two(self: Any, hidden_states: torch.Tensor) -> Any:
    logits = torch.nn.functional.linear(hidden_states, self.weight)
    values, chosen = logits.topk(self.top_k, dim=-1)
    return values.softmax(-1), chosen


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (clamped, "it also computes clamp"),
        (halved, "its scores are not the softmax over the chosen logits"),
        (least, "its scores are not the softmax over the chosen logits"),
        (of_two, "it returns something else than logits, scores and experts"),
    ],
)
def test_a_forward_of_other_code_is_told_by_what_it_does(forward: Any, said: str) -> None:
    """A clamp far beyond what is tried shows as an operator, not in numbers."""
    model = built("mixtral")
    router = model.model.layers[1].mlp.gate
    router.__class__ = type("Mine", (type(router),), {"forward": forward})
    assert recipe_of(router) == said
    with inside(Routers(model), original_kernel("router")) as book:
        assert book.layers == LayerSurvey(1, type(book.reasons)({said: 1}))


def test_a_small_spread_of_logits_does_not_hide_a_missing_division() -> None:
    """With weights so large that two of four experts have nearly all of the softmax."""
    model = built("olmoe")
    router = model.model.layers[0].mlp.gate
    router.weight.data *= 1000
    assert recipe_of(router) == "its scores are not the softmax over the chosen logits"
    router.norm_topk_prob = True
    assert isinstance(recipe_of(router), Recipe)


def test_a_forward_in_place_of_the_modules_own_is_refused() -> None:
    model = built("mixtral")
    router = model.model.layers[0].mlp.gate
    router.forward = types.MethodType(clamped, router)
    with pytest.raises(VerificationError, match=r"MixtralTopKRouter.forward was replaced"):
        Routers(model).find()


@torch.inference_mode()
def test_settings_that_change_later_run_the_models_own() -> None:
    model = built("qwen3_moe", **SUM)
    routers = [each for each in model.modules() if Routers(model).of_role(each)]
    with inside(Routers(model), original_kernel("router")) as book:
        routers[0].norm_topk_prob = False
        model.train()
        model.eval()
        during = model(TOKENS).logits
    assert dict(book.reasons) == {"its settings were changed": 1}
    assert torch.allclose(during, model(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_a_model_that_gets_another_dtype_later_gives_what_it_gives_alone(kind: str) -> None:
    model, rows = built(kind, **ROUTED[kind]), torch.randn(5, 64).bfloat16()
    router = next(each for each in model.modules() if Routers(model).of_role(each))
    with inside(Routers(model), original_kernel("router")) as book:
        during = router.bfloat16()(rows)
    for one, other in zip(during, router(rows), strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)
    assert dict(book.reasons) == {"input or weight in another dtype": 1}


def of_three_axes(self: Any, hidden_states: torch.Tensor) -> Any:
    _, _, size = hidden_states.shape
    return torch.nn.functional.linear(hidden_states.view(-1, size), self.weight).topk(2)


def of_a_pair(self: Any, hidden_states: Any) -> Any:
    assert isinstance(hidden_states, tuple)


@pytest.mark.parametrize("forward", [of_three_axes, of_a_pair])
def test_a_router_that_is_called_otherwise_is_told_and_the_others_are_taken(forward: Any) -> None:
    model = built("mixtral")
    router = model.model.layers[1].mlp.gate
    router.__class__ = type("Mine", (type(router),), {"forward": forward})
    with inside(Routers(model), original_kernel("router")) as book:
        assert book.layers is not None
        assert book.layers.taken == 1
        [said] = book.layers.refused
    assert said.startswith("it cannot be tried alone: ")


def test_gradients_and_autocast_run_the_models_own() -> None:
    model = built("mixtral")
    router, rows = model.model.layers[0].mlp.gate, torch.randn(2, 64)
    with inside(Routers(model), original_kernel("router")) as book:
        assert router(rows)[1].requires_grad
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            router(rows)
    assert dict(book.reasons) == {"gradients are on": 1, "autocast is on": 1}


@torch.inference_mode()
def test_logits_are_recorded_and_hooks_see_them() -> None:
    model = built("mixtral")
    seen: list[Any] = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda m, a, output: seen.append(output))
    before = model(TOKENS, output_router_logits=True).router_logits
    with inside(Routers(model), original_kernel("router")) as book:
        during = model(TOKENS, output_router_logits=True).router_logits
    assert [len(before), len(during), len(seen), book.calls.total()] == [2, 2, 2, 2]
    assert all(torch.allclose(*both, atol=1e-5) for both in zip(before, during, strict=True))


@torch.inference_mode()
def test_compiled_code_runs_the_kernel() -> None:
    model = built("mixtral")
    router, rows = model.model.layers[0].mlp.gate, torch.randn(4, 64)
    before = router(rows)
    with inside(Routers(model), original_kernel("router")) as book:
        during = torch.compile(router, backend="eager", fullgraph=True)(rows)
        assert book.calls.total() == 1
    assert torch.allclose(during[1], before[1])
    assert during[2].equal(before[2])


def test_two_patches_of_one_router_exclude_each_other() -> None:
    model = built("gpt_oss")
    own: Any = POINTS["gpt_oss.router"](model)
    with (
        inside(own, original_kernel("gpt_oss.router")),
        pytest.raises(VerificationError, match="is already patched"),
    ):
        Routers(model).find()
    assert Routers(model).find()


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "qwen2_moe", "olmoe", "llama"])
def test_a_config_tells_of_the_role(kind: str, tmp_path: Any) -> None:
    for settings in ({}, SUM):
        config = built(kind, **settings).config
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
        there = kind in ("mixtral", "granitemoe") or (settings and kind != "llama")
        if there:
            said = of_model("router", lambda: full_config(str(tmp_path)))
            assert said.startswith(f"{kind} has ")
        else:
            with pytest.raises(VerificationError, match=f"no router of {kind} in transformers"):
                of_model("router", lambda: full_config(str(tmp_path)))


def test_a_config_whose_settings_do_not_fit_together_has_no_router(tmp_path: Any) -> None:
    config = built("axk1").config  # four experts in eight groups
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with pytest.raises(VerificationError, match="no router of axk1 in transformers"):
        of_model("router", lambda: full_config(str(tmp_path)))
