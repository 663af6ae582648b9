"""The role of a residual addition with the norm after it, in layers of many kinds."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import accelerate
import peft
import pytest
import torch
from feature_matrix import feature
from patch_sample import add_norm_guards
from tiny_roles import TOKENS, built, run_in
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.bench.engines.architecture import full_config
from patcher.integrate.counts import REPLACED
from patcher.integrate.guards import AxisBounds
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.places import calls_in_step
from patcher.integrate.transformers import places
from patcher.integrate.transformers.places import of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.add_norm import AddNorms

ADDED: dict[str, int] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "gpt_oss"), 4),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "glm4_moe", "llama4_text"), 4),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_linear", "glm4_moe_lite"), 4),
    # what they add is scaled before, or normalised
    **dict.fromkeys(("granite", "granitemoehybrid", "glm4", "falcon_h1"), 4),
}
"""By architecture: the calls of its two layers, each two."""
OTHERS = {
    "olmo2": "; 2: no norm of the sum follows an addition",
    "cohere": "; 2: it adds to its residual in another way",
    **dict.fromkeys(("gemma2", "gemma3_text", "qwen3_next"), "; 2: its norms are of another kind"),
    **dict.fromkeys(("gpt2", "opt", "deepseek_v4"), ""),
}


def norms_differ(model: Any) -> Any:
    """The model with norms that differ from each other."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model


def made(kind: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return norms_differ(built(kind, dtype, **more))


@pytest.mark.parametrize(("kind", "calls"), ADDED.items())
def test_every_addition_and_norm_of_a_model_runs_the_kernel(kind: str, calls: int) -> None:
    model = made(kind)
    point = AddNorms(model)
    assert point.find() == f"{calls} instances in {type(model).__name__}"
    book, error = run_in(model, point)
    assert (book.calls.total(), book.reasons.total()) == (calls, 0)
    assert book.layers == LayerSurvey(taken=calls), "as many calls a step"
    assert error < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3", "granite", "qwen3_moe"])
def test_in_bfloat16_too(kind: str) -> None:
    model = made(kind, torch.bfloat16)
    book, error = run_in(model, AddNorms(model))
    assert (book.calls.total(), book.reasons.total()) == (4, 0)
    assert error < 3e-2


@pytest.mark.parametrize(("kind", "said"), OTHERS.items())
def test_other_layers_stay_and_are_told(kind: str, said: str, tmp_path: Any) -> None:
    model = made(kind)
    with pytest.raises(VerificationError, match="has no decoder layer that takes") as caught:
        AddNorms(model).find()
    assert caught.value.message.endswith(said or "of a sum with its residual")
    (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
    with pytest.raises(VerificationError, match=f"no layer of {kind} in transformers takes"):
        of_model("add_norm", lambda: full_config(str(tmp_path)))


@pytest.mark.parametrize("kind", ["llama", "granite", "deepseek_v3", "falcon_h1", "phi3"])
def test_a_config_tells_of_the_role_and_how_often_a_step_comes_by(kind: str, tmp_path: Any) -> None:
    config = built(kind).config
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    said = of_model("add_norm", lambda: full_config(str(tmp_path)))
    assert said.startswith(f"{kind} has ")
    calls = calls_in_step("transformers", "add_norm", full_config(str(tmp_path)))
    assert calls is not None
    assert (calls.taken, calls.refused) == (ADDED[kind], {})
    narrow = add_norm_guards({"hidden": AxisBounds(maximum=32)})
    calls = places.calls_in_step("add_norm", built(kind).config.to_dict(), narrow)
    assert calls is not None
    assert (calls.taken, calls.refused.total()) == (0, ADDED[kind])


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    before = model(TOKENS).logits
    monkeypatch.setattr(AddNorms, "original", staticmethod(lambda added, *rest: added.zero_()))
    with inside(AddNorms(model), original_kernel("add_norm")):
        assert not torch.allclose(model(TOKENS).logits, before, rtol=1e-3, atol=1e-4)
    assert model(TOKENS).logits.equal(before)


@torch.inference_mode()
def test_other_models_of_the_class_keep_their_layers() -> None:
    model, other = made(), made()
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        other(TOKENS)
        assert book.calls.total() == book.reasons.total() == 0


@feature("`generate`, batches, a cache", "right", "add_norm")
@torch.inference_mode()
def test_generated_tokens_are_the_same() -> None:
    for kind in ("llama", "falcon_h1", "kimi_linear"):
        model = made(kind)
        before = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
        with inside(AddNorms(model), original_kernel("add_norm")) as book:
            during = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
        assert during.equal(before)
        assert (book.calls.total(), book.reasons.total()) == (6 * 4, 0)


@torch.inference_mode()
def test_what_was_given_is_not_written_to() -> None:
    model = made()
    embedded = model.model.embed_tokens(TOKENS)
    kept = embedded.clone()
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        model(inputs_embeds=embedded)
    assert embedded.equal(kept)
    assert book.calls.total() == 4


# --- who watches, or computes otherwise


def hidden_states(model: Any) -> Any:
    return torch.stack(model(TOKENS, output_hidden_states=True).hidden_states)


def hooked(model: Any) -> Any:
    seen: list[torch.Tensor] = []
    part = model.model.layers[0].self_attn.o_proj
    handle = part.register_forward_hook(lambda module, given, output: seen.append(output))
    model(TOKENS)
    handle.remove()
    return seen[0]


def layer_hooked(model: Any) -> Any:
    seen: list[torch.Tensor] = []
    handle = model.model.layers[0].register_forward_hook(lambda m, g, output: seen.append(output))
    model(TOKENS)
    handle.remove()
    return seen[0]


def with_gradients(model: Any) -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        model.zero_grad()
        model(TOKENS, labels=TOKENS).loss.backward()
    return model.model.layers[0].mlp.down_proj.weight.grad.clone()


def in_autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(TOKENS).logits


def a_layer_alone(model: Any) -> Any:
    hidden = model.model.embed_tokens(TOKENS)
    angles = model.model.rotary_emb(hidden, torch.arange(8)[None])
    return model.model.layers[0](hidden, position_embeddings=angles)


WATCHED: dict[Callable[[Any], Any], dict[str, int]] = {
    hidden_states: {"hidden states are being recorded": 4},
    hooked: {"a module has hooks": 2},
    layer_hooked: {"a module has hooks": 2},
    with_gradients: {"gradients are on": 4},
    a_layer_alone: {"a layer is called on its own, or by several threads at a time": 2},
}


@feature("`output_hidden_states`", "falls back", "add_norm")
@feature("hooks, gradients", "falls back", "add_norm")
@pytest.mark.parametrize(("use", "told"), WATCHED.items())
@torch.no_grad()
def test_whoever_watches_sees_the_models_own(
    use: Callable[[Any], Any], told: dict[str, int]
) -> None:
    model = made()
    before = use(model)
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        during = use(model)
    assert dict(book.reasons) == told
    assert torch.allclose(during, before, rtol=1e-5, atol=1e-6)
    assert use(model).equal(before)


@feature("autocast", "right", "add_norm")
@torch.no_grad()
def test_autocast_is_right_and_every_call_is_counted() -> None:
    model = made()
    before = in_autocast(model)
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        during = in_autocast(model)
    assert torch.allclose(during, before, rtol=1e-2, atol=1e-2)
    assert book.calls.total() + book.reasons.total() == 4


@torch.inference_mode()
def test_a_dtype_that_is_set_later_is_right() -> None:
    model = made()
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        model.to(torch.bfloat16)
        narrow = model(TOKENS).logits
        assert (book.calls.total(), book.reasons.total()) == (4, 0)
        model.model.norm.float()  # Llama's return float32 then
        model.lm_head.float()
        wide = model(TOKENS).logits
    assert dict(book.reasons) == {"weight in another dtype": 1}
    assert torch.allclose(model(TOKENS).logits, wide, rtol=3e-2, atol=3e-2)
    model.to(torch.bfloat16)
    assert torch.allclose(model(TOKENS).logits, narrow, rtol=3e-2, atol=3e-2)


@torch.inference_mode()
def test_norms_that_keep_the_dtype_of_their_input_may_be_wide() -> None:
    model = made("gpt_oss", torch.bfloat16)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    book, error = run_in(model, AddNorms(model))
    assert (book.calls.total(), book.reasons.total()) == (4, 0)
    assert error < 3e-2


def turned(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))


def without_the_first(model: Any) -> None:
    del model.model.layers[0]


def shorter(model: Any) -> None:
    del model.model.layers[-1]


def other_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_attention_layernorm = torch.nn.LayerNorm(64)


def trained_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm = copy.deepcopy(layer.input_layernorm)
        layer.input_layernorm.weight.data *= 3
    model.model.norm = copy.deepcopy(model.model.norm)
    model.model.norm.weight.data *= 3


class Keeping(torch.nn.Module):
    """A part of someone else's, which keeps what it gave."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, []  # type: ignore[var-annotated]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden) * 2
        self.kept.append((output, output.clone()))
        return output


def wrapped_mlps(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp = Keeping(layer.mlp)


def wrapped_norms(model: Any) -> None:
    for layer in model.model.layers:
        own = layer.post_attention_layernorm.forward
        layer.post_attention_layernorm.forward = lambda hidden, own=own: own(hidden) * 2


def hooks_inside(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, given, output: output + 1)


CHANGES = (turned, without_the_first, shorter, other_norms, trained_norms, wrapped_mlps)


@feature("parts, norms, layers, hooks or weights changed later", "right", "add_norm")
@pytest.mark.parametrize("change", [*CHANGES, wrapped_norms, hooks_inside])
@pytest.mark.parametrize("ran_before", [False, True])
@torch.inference_mode()
def test_a_model_that_is_changed_later_is_right_and_every_call_is_counted(
    change: Callable[[Any], None], ran_before: bool
) -> None:
    model, plain = made(num_hidden_layers=3), made(num_hidden_layers=3)
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        if ran_before:
            model(TOKENS)
        before = book.calls.total() + book.reasons.total()
        change(model)
        change(plain)
        found, expected = model(TOKENS).logits, plain(TOKENS).logits
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        counted = book.calls.total() + book.reasons.total() - before
        assert counted == 2 * len(model.model.layers), dict(book.reasons)
    for module in model.modules():
        for kept, then in getattr(module, "kept", ()):
            assert kept.equal(then), "written to after it was handed out"


@torch.inference_mode()
def test_a_layer_that_is_replaced_is_told() -> None:
    model = made()
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        model.model.layers[0] = copy.deepcopy(model.model.layers[0])
        model(TOKENS)
        assert book.calls.total() == 2
        assert book.layers == LayerSurvey(2, Counter({REPLACED: 2}))


def test_a_copy_of_a_patched_layer_counts_what_it_would_have_called() -> None:
    model = made()
    layer = model.model.layers[1]
    with torch.inference_mode(), inside(AddNorms(model), original_kernel("add_norm")) as book:
        hidden = model.model.embed_tokens(TOKENS)
        angles = model.model.rotary_emb(hidden, torch.arange(8)[None])
        copy.copy(layer)
        replica = layer._replicate_for_data_parallel()
        replica._parameters, replica._modules = layer._parameters, layer._modules
        replica(hidden, position_embeddings=angles)
    assert dict(book.reasons) == {"a copy of a patched module": 2}


@feature("several threads", "right", "add_norm")
@torch.inference_mode()
def test_overlapping_forwards_of_two_threads_do_not_mix() -> None:
    model, other = made(), torch.flip(TOKENS, (1,))
    expected = model(TOKENS).logits, model(other).logits
    others: list[torch.Tensor] = []
    kernel, calls = original_kernel("add_norm"), 0
    own = kernel._kernel

    def second() -> None:
        with torch.inference_mode():
            others.append(model(other).logits)

    def overlapping(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # in the midst of the first forward, a whole other one
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        own(*args)

    kernel._kernel = overlapping
    with inside(AddNorms(model), kernel) as book:
        mixed = model(TOKENS).logits
    assert torch.allclose(mixed, expected[0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(others[0], expected[1], rtol=1e-5, atol=1e-6)
    assert set(book.reasons) == {"a layer is called on its own, or by several threads at a time"}


@feature("`torch.compile` of the whole model", "right", "add_norm")
@pytest.mark.parametrize("kind", ["llama", "granite", "glm4_moe", "falcon_h1"])
@torch.inference_mode()
def test_a_compiled_model_calls_the_kernel(kind: str) -> None:
    model = made(kind)
    kernel, point = original_kernel("add_norm"), AddNorms(model)
    step: Any = torch.compile(model, backend="eager")
    try:
        before = step(TOKENS, use_cache=False).logits
        with inside(point, kernel) as book:
            for _ in range(2):
                during = step(TOKENS, use_cache=False).logits
            assert (book.calls.total(), dict(book.reasons)) == (8, {})
        assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
        assert step(TOKENS, use_cache=False).logits.equal(before)
        assert book.calls.total() == 8
    finally:
        torch._dynamo.reset()


@feature("peft: norms, off, merged", "right", "add_norm")
@torch.inference_mode()
def test_norms_that_an_adapter_tunes_count() -> None:
    model = made()
    plain = model(TOKENS).logits
    tuned = peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"])
    adapted = peft.get_peft_model(model, tuned).eval()
    for parameter in (each for each in adapted.parameters() if each.requires_grad):
        parameter.data.mul_(3)
    before = adapted(TOKENS).logits
    assert not torch.allclose(before, plain, atol=1e-3)
    with pytest.raises(VerificationError, match="2: its norms are of another kind"):
        AddNorms(adapted).find()
    merged = adapted.merge_and_unload()
    book, error = run_in(merged, AddNorms(merged))
    assert (book.calls.total(), error < 1e-5) == (4, True)


@feature("peft: LoRA, off, merged", "right", "add_norm")
@torch.inference_mode()
def test_an_adapter_that_comes_later_counts() -> None:
    model, plain = made(), made()
    lora = peft.LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, lora).eval()
        torch.manual_seed(1)
        expected = peft.get_peft_model(plain, lora).eval()(TOKENS).logits
        assert torch.allclose(adapted(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
        assert (book.calls.total(), book.reasons.total()) == (4, 0)


@feature("`device_map`, offload: spread before it is patched", "refused", "add_norm")
def test_an_offloaded_model_is_refused_in_words() -> None:
    model = accelerate.cpu_offload(made(), execution_device="cpu")
    with pytest.raises(VerificationError, match=r"forward was replaced by a hook of accelerate"):
        AddNorms(model).find()


@pytest.mark.parametrize("second", ["norm", "add_norm", "gpt_oss.decoder_layer"])
def test_a_norm_is_of_one_patch(second: str) -> None:
    model = made("gpt_oss")
    with (
        inside(AddNorms(model), original_kernel("add_norm")),
        pytest.raises(VerificationError, match="is already patched"),
    ):
        POINTS[second](model).find()
    with (
        inside(POINTS[second](model), original_kernel(second)),  # type: ignore[call-arg]
        pytest.raises(VerificationError, match="is already patched"),
    ):
        AddNorms(model).find()


@feature("other points beside it", "right", "add_norm")
@torch.inference_mode()
def test_it_stands_beside_the_points_of_other_parts() -> None:
    model = made()
    before = model(TOKENS).logits
    names = ("add_norm", "linear", "gated_mlp", "rotation")
    points = [POINTS[name](model) for name in names]
    kernels = [original_kernel(name) for name in names]
    for _ in range(2):
        for point, kernel in zip(points, kernels, strict=True):
            point.install(kernel)
        during = model(TOKENS).logits
        for point in points:
            point.remove()
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert [kernel.book.calls.total() for kernel in kernels] == [8, 30, 4, 4]
    assert [kernel.book.reasons for kernel in kernels] == [Counter()] * 4
    assert model(TOKENS).logits.equal(before)
