"""The role of a rotation, in models of many kinds: tried in its attention, with its own weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

import accelerate
import peft
import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import full_config
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.transformers.places import calls_in_step, of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.rotation import Rotations, rotaries_of
from patcher.integrate.transformers.roles.rotation_probe import HeadRotation, turn_of

WHOLE = ("llama", "qwen2", "qwen3", "mixtral", "gemma3_text", "olmo2", "gpt_oss", "jetmoe")
"""Whose heads are turned as a whole, and where they are."""
ROTATED: dict[str, int] = {
    **dict.fromkeys((*WHOLE, "gemma2", "qwen3_moe", "falcon_h1", "olmo", "starcoder2"), 2),
    **dict.fromkeys(("glm4_moe", "gpt_neox", "phi", "persimmon", "nemotron"), 2),  # a part
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), 2),  # pairs are put apart
    "ministral3": 2,  # which also needs positions
    **dict.fromkeys(("phi3", "modernbert-decoder"), 2),  # slices of one projection
    **dict.fromkeys(("lfm2", "qwen3_next"), 1),
}
OTHERS = {
    "cohere": "2: it turns other pairs than a head's halves",
    "glm4": "2: it turns other pairs than a head's halves",
    "ernie4_5": "2: it turns other pairs than a head's halves",
    "granitemoehybrid": "1: its model has no angles for it",
    **dict.fromkeys(("gpt2", "mamba2", "llama4_text", "deepseek_v2", "opt"), ""),
}


@pytest.mark.parametrize(("kind", "layers"), ROTATED.items())
def test_every_rotation_of_a_model_runs_the_kernel(kind: str, layers: int) -> None:
    model = built(kind)
    point = Rotations(model)
    assert point.find() == f"{layers} instances in {type(model).__name__}"
    book, error = run_in(model, point)
    assert (book.calls.total(), book.reasons.total()) == (layers, 0)
    assert book.layers == LayerSurvey(taken=layers)
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["llama", "olmo2", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_in_bfloat16_too(kind: str) -> None:
    book, error = run_in(model := built(kind, torch.bfloat16), Rotations(model))
    assert (book.calls.total(), book.reasons.total()) == (2, 0)
    assert error < 3e-2


@pytest.mark.parametrize(("kind", "said"), OTHERS.items())
def test_other_rotations_stay_and_are_told(kind: str, said: str, tmp_path: Any) -> None:
    model = built(kind)
    with pytest.raises(VerificationError, match="has no attention whose rotation") as caught:
        Rotations(model).find()
    assert caught.value.message.endswith(f"; {said}" if said else "the halves of a head")
    (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
    with pytest.raises(VerificationError, match=f"no attention of {kind} in transformers"):
        of_model("rotation", lambda: full_config(str(tmp_path)))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3", "glm4_moe"])
def test_a_config_tells_of_the_role(kind: str, tmp_path: Any) -> None:
    config = built(kind).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    said = of_model("rotation", lambda: full_config(str(tmp_path)))
    assert said.startswith(f"{kind} has ")


@pytest.mark.parametrize("kind", ["jamba", "mvp", "xmod", "bamba"])
@pytest.mark.parametrize("point", ["linear", "rotation"])
def test_a_model_whose_code_does_not_run_without_weights_promises_no_number(
    kind: str, point: str, tmp_path: Any
) -> None:
    config = built(kind).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert calls_in_step(point, full_config(str(tmp_path))) is None


def attention_of(model: Any) -> Any:
    return next(each for each in model.modules() if Rotations(model).of_role(each))


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    before = model(TOKENS).logits
    monkeypatch.setattr(Rotations, "original", staticmethod(lambda q, k, table: q.zero_()))
    with inside(Rotations(model), original_kernel("rotation")):
        assert not torch.allclose(model(TOKENS).logits, before, rtol=1e-3, atol=1e-4)
    assert model(TOKENS).logits.equal(before)


@torch.inference_mode()
def test_other_models_of_the_file_keep_their_rotation() -> None:
    model, other = built("llama"), built("llama")
    with inside(Rotations(model), original_kernel("rotation")) as book:
        other(TOKENS)
        assert book.calls.total() == book.reasons.total() == 0


@torch.inference_mode()
def test_whole_heads_are_turned_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is made only of what is not dense: of a part of each head, or of a slice."""
    made: list[int] = []
    own = torch.Tensor.clone

    def clone(tensor: Any, *args: Any, **more: Any) -> Any:
        if tensor.dim() == 4 and tensor.shape[1] == TOKENS.shape[1]:
            made.append(1)
        return own(tensor, *args, **more)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    for kind, copies in (("llama", 0), ("glm4_moe", 4), ("phi3", 4)):
        model = built(kind)
        with inside(Rotations(model), original_kernel("rotation")):
            made.clear()
            model(TOKENS, use_cache=False)
        assert len(made) == copies, kind


@torch.inference_mode()
def test_layers_of_one_forward_share_a_table_and_of_the_next_do_not() -> None:
    model = built("llama")
    point = Rotations(model)
    angles = model.model.rotary_emb(torch.ones(1, 8, 64), torch.arange(8)[None])
    attention, hidden = attention_of(model), torch.randn(1, 8, 64)
    with inside(point, original_kernel("rotation")):
        model(TOKENS)
        assert point._table.kept is None
        first = attention(hidden, position_embeddings=angles, attention_mask=None)[0]
        for each in angles:
            each.mul_(0.5)
        second = attention(hidden, position_embeddings=angles, attention_mask=None)[0]
        assert not first.equal(second), "the same tensors hold other angles"
    expected = attention(hidden, position_embeddings=angles, attention_mask=None)[0]
    assert torch.allclose(second, expected, rtol=1e-4, atol=1e-6)


def test_gradients_hooks_and_other_sizes_run_the_models_own() -> None:
    model = built("llama")
    attention, hidden = attention_of(model), torch.randn(1, 8, 64)
    angles = model.model.rotary_emb(hidden, torch.arange(8)[None])
    seen: list[Any] = []

    def call(cos: Any = angles[0], sin: Any = angles[1]) -> Any:
        return attention(hidden, position_embeddings=(cos, sin), attention_mask=None)[0]

    with inside(Rotations(model), original_kernel("rotation")) as book:
        assert call().requires_grad
        with torch.no_grad():
            hook = attention.q_proj.register_forward_hook(lambda m, a, output: seen.append(output))
            call()
            hook.remove()
            call(*(each.half() for each in angles))
            call()
    assert torch.allclose(seen[0], attention.q_proj(hidden)), "it keeps what it saw"
    assert dict(book.reasons) == {
        "gradients are on": 1,
        "a module has hooks": 1,
        "query, key or cosines in another dtype": 1,
    }
    assert book.calls.total() == 1


@torch.inference_mode()
def test_what_an_adapter_keeps_is_copied_and_the_adapter_counts() -> None:
    model = built("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data.uniform_(0.1, 0.3)
    book, error = run_in(adapted, Rotations(adapted))
    assert (book.calls.total(), book.reasons.total()) == (2, 0)
    assert error < 1e-5


class Again(torch.nn.Module):
    """An attention that reads its query once more, after the rotation of another tensor."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.config, self.q_proj, self.layer_idx = own.config, own.q_proj, 0

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None
    ) -> Any:
        heads = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], 4, -1).transpose(1, 2)
        turned, _ = apply_rotary_pos_emb(heads, heads.clone(), *position_embeddings)
        return (turned - heads).sum(1)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, -1)
        return heads * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def test_an_attention_that_reads_what_it_rotates_again_is_left() -> None:
    model = built("llama")
    again = Again(attention_of(model)).eval()
    assert turn_of(again, rotaries_of(model)) == "it reads what it rotates again"
    model.model.layers[0].self_attn = again
    with inside(Rotations(model), original_kernel("rotation")) as book:
        assert book.layers == LayerSurvey(1, Counter({"it reads what it rotates again": 1}))


def test_an_attention_that_cannot_be_tried_alone_is_told() -> None:
    model = built("llama")
    del attention_of(model).o_proj
    said = turn_of(attention_of(model), rotaries_of(model))
    assert isinstance(said, str)
    assert said.startswith("it cannot be tried alone: ")
    assert turn_of(attention_of(model), []) == "its model has no angles for it"
    assert isinstance(turn_of(attention_of(built("llama").to("meta")), []), str)


def raising(error: Exception) -> Any:
    def forward(*args: Any, **more: Any) -> Any:
        raise error

    return forward


@pytest.mark.parametrize("error", [AssertionError("no"), KeyError("full_attention"), TypeError()])
def test_angles_that_cannot_be_computed_alone_are_told(error: Exception) -> None:
    model = built("llama")
    [rotary] = rotaries_of(model)
    rotary.forward = raising(error)
    said = turn_of(attention_of(model), [rotary])
    assert isinstance(said, str)
    assert said.startswith("its angles cannot be computed alone: ")


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def hooked(model: Any) -> Any:
    return accelerate.hooks.add_hook_to_module(model, accelerate.hooks.ModelHook())


@pytest.mark.parametrize("wrapped", [compiled, hooked])
def test_a_model_whose_own_forward_is_covered_is_patched_and_reverted(wrapped: Any) -> None:
    model = wrapped(built("llama"))
    book, error = run_in(model, Rotations(model))
    assert (book.calls.total(), book.reasons.total()) == (2, 0)
    assert error < 1e-5


def test_a_model_in_training_is_tried_without_dropout_and_draws_nothing() -> None:
    model = built("llama", attention_dropout=0.5).train()
    before = torch.get_rng_state()
    assert Rotations(model).find() == "2 instances in LlamaForCausalLM"
    assert torch.get_rng_state().equal(before)
    assert all(each.training for each in model.modules())


def test_shapes_alone_tell_of_a_model_without_weights() -> None:
    model = built("deepseek_v3").to("meta")
    turn = turn_of(attention_of(model), rotaries_of(model))
    assert isinstance(turn, HeadRotation)
    assert turn.paired


@torch.inference_mode()
def test_compiled_code_runs_the_kernel() -> None:
    model = built("llama")
    before = model(TOKENS, use_cache=False).logits
    with inside(Rotations(model), original_kernel("rotation")) as book:
        during = torch.compile(model, backend="eager")(TOKENS, use_cache=False).logits
        assert book.calls.total() == 2
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)


def test_two_patches_of_one_attention_exclude_each_other() -> None:
    model = built("gpt_oss")
    own: Any = POINTS["gpt_oss.rotary_embedding"](model)
    with (
        inside(own, original_kernel("gpt_oss.rotary_embedding")),
        pytest.raises(VerificationError, match="is already patched"),
    ):
        Rotations(model).find()
    assert Rotations(model).find()


@torch.inference_mode()
def test_the_roles_of_a_model_work_side_by_side() -> None:
    model = built("mixtral")
    before = model(TOKENS).logits
    points: list[Any] = [POINTS[name](model) for name in ("norm", "linear", "router", "rotation")]
    books = []
    for point in points:
        point.install(kernel := original_kernel(point.name))
        books.append(kernel.book)
    during = model(TOKENS).logits
    for point in reversed(points):
        point.remove()
    assert [book.calls.total() for book in books] == [5, 9, 2, 2]
    assert not any(book.reasons for book in books)
    assert torch.allclose(during, before, rtol=1e-3, atol=1e-4)
    assert model(TOKENS).logits.equal(before)
