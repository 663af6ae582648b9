"""The role of a norm, in models of several kinds: found by what it holds and computes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import peft
import pytest
import torch
import transformers
from feature_matrix import feature
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError, load_op
from patcher.hotspot.coverage import by_symbols
from patcher.integrate import CallCounters
from patcher.integrate.activation import contract_guards
from patcher.integrate.counts import REPLACED
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.transformers import norm_sources
from patcher.integrate.transformers.model_files import modeling_file
from patcher.integrate.transformers.places import LAYERS, NORMS, of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.norm import GemmaRmsNorms, RmsNorms

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
HYBRID = ["linear_attention", "full_attention"]
TOKENS = torch.arange(1, 17).view(2, 8)
KINDS = ("llama", "qwen3", "gpt_oss", "mixtral", "deepseek_v3", "olmo2")


def built(kind: str, **more: Any) -> Any:
    """A model whose norms differ from each other."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


@pytest.mark.parametrize(("kind", "norms"), [("llama", 5), ("qwen3", 9), ("mixtral", 5)])
@torch.inference_mode()
def test_every_norm_of_a_model_runs_the_kernel(kind: str, norms: int) -> None:
    model = built(kind)
    before = model(TOKENS).logits
    point = RmsNorms(model)
    assert point.find() == f"{norms} instances in {type(model).__name__}"
    with inside(point, original_kernel("norm")) as book:
        during = model(TOKENS).logits
    assert (sum(book.calls.values()), sum(book.reasons.values())) == (norms, 0)
    assert book.layers == LayerSurvey(taken=norms), "as many calls a step"
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert model(TOKENS).logits.equal(before), "without the patch the same bits"
    assert not any("patch_point" in vars(type(each)) for each in model.modules())


# the norms of Gemma 3's heads are called on transposed rows, but where a step has one token
@pytest.mark.parametrize(
    ("kind", "norms", "strided"), [("gemma3_text", 13, 4), ("qwen3_next", 7, 0)]
)
@torch.inference_mode()
def test_norms_of_one_more_than_their_weight_are_of_another_op(
    kind: str, norms: int, strided: int
) -> None:
    model = built(kind, **({"layer_types": HYBRID} if kind == "qwen3_next" else {}))
    before = model(TOKENS).logits
    point = GemmaRmsNorms(model)
    assert point.find() == f"{norms} instances in {type(model).__name__}"
    with inside(point, original_kernel("gemma_norm")) as book:
        during = model(TOKENS).logits
    assert sum(book.calls.values()) == norms - strided
    assert dict(book.reasons) == ({"not contiguous": strided} if strided else {})
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert model(TOKENS).logits.equal(before)
    with pytest.raises(VerificationError, match="no norm that multiplies by one more"):
        GemmaRmsNorms(built("llama")).find()


@torch.inference_mode()
def test_norms_with_a_gate_are_left_to_the_model() -> None:
    model = built("mamba2", num_heads=8, state_size=16, n_groups=1, head_dim=16, chunk_size=16)
    gated = [each for each in model.modules() if type(each).__name__.endswith("RMSNormGated")]
    assert gated
    point = RmsNorms(model)
    assert not any(point.of_role(each) for each in gated)
    with inside(point, original_kernel("norm")) as book:
        model(TOKENS)
    assert book.layers == LayerSurvey(taken=sum(book.calls.values()))


@torch.inference_mode()
def test_weights_at_any_offset_of_a_mapped_file_are_taken() -> None:
    model = built("llama")
    for norm in (each for each in model.modules() if RmsNorms(model).of_role(each)):
        mapped = torch.empty(len(norm.weight) + 1)[1:].copy_(norm.weight)
        norm.weight.set_(mapped)
        assert norm.weight.data_ptr() % 16
    contract = load_op("rms_norm").contract
    guards = contract_guards(contract, "cpu", contract.dtype_choices())
    book = CallCounters("rms_norm", "0" * 64)
    with inside(RmsNorms(model), Dispatcher("rms_norm", RmsNorms.original, guards, book)):
        model(TOKENS)
    assert (sum(book.calls.values()), dict(book.reasons)) == (5, {})


def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    monkeypatch.setattr(RmsNorms, "original", staticmethod(lambda i, w, out, e: out.fill_(7)))
    with torch.inference_mode(), inside(RmsNorms(model), original_kernel("norm")):
        assert model.model.norm(torch.ones(2, 64)).eq(7).all()


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "qwen3_next"])
def test_norms_that_compute_something_else_are_refused_before_a_model_is_built(kind: str) -> None:
    with pytest.raises(VerificationError, match="multiplies by its weight alone"):
        of_model("norm", lambda: {"model_type": kind})


def test_a_model_has_norms_of_one_op_or_of_the_other() -> None:
    for kind in ("gemma3_text", "qwen3_next"):
        said = of_model("gemma_norm", lambda kind=kind: {"model_type": kind})  # type: ignore[misc]
        assert "RMSNorm" in said
    with pytest.raises(VerificationError, match="one more than its weight"):
        of_model("gemma_norm", lambda: {"model_type": "llama"})


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2"])
def test_norms_that_compute_something_else_stay(kind: str) -> None:
    with pytest.raises(VerificationError, match="no norm that multiplies by its weight alone"):
        RmsNorms(built(kind)).find()


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_tells_whether_the_role_is_there(kind: str) -> None:
    assert "RMSNorm" in of_model("norm", lambda: {"model_type": kind})


@pytest.mark.parametrize("kind", [*KINDS, "gemma3", "mamba2", "t5"])
def test_what_was_read_of_a_class_is_what_it_computes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = modeling_file(kind)
    assert file is not None
    read = [list(norm_sources.norm_classes(file, op)) for op, _ in NORMS.values()]
    monkeypatch.setattr(norm_sources, "_read", dict)
    tried = [list(norm_sources.norm_classes(file, op)) for op, _ in NORMS.values()]
    assert tried == read, "each is built and tried"


def test_every_point_tells_of_a_model() -> None:
    assert set(POINTS) == set(LAYERS)


def test_without_a_model_the_way_is_named() -> None:
    with pytest.raises(VerificationError, match="in a built model alone") as caught:
        RmsNorms().install(original_kernel("norm"))
    assert "integrate.activate" in caught.value.hint


def test_gradients_and_strides_run_the_models_own_norm() -> None:
    model = built("llama")
    norm = model.model.norm
    rows = torch.randn(4, 64)
    with inside(RmsNorms(model), original_kernel("norm")) as book:
        assert norm(rows).requires_grad
        with torch.no_grad():
            norm(torch.randn(64, 4).T)
    assert dict(book.reasons) == {"gradients are on": 1, "not contiguous": 1}


def test_norms_of_heads_are_rows_of_the_op() -> None:
    ops = [op.name for op in by_symbols("module::Qwen3RMSNorm.q_norm")]
    assert ops == ["rms_norm"]
    ops = [op.name for op in by_symbols("module::Gemma3RMSNorm.q_norm")]
    assert ops == ["gemma_rms_norm"]
    assert [op.name for op in by_symbols("module::Gemma4RMSNorm.q_norm")] == ["rms_norm"]
    assert load_op("rms_norm").contract.patch_points[0].point == "norm"


def another_norm(model: Any) -> None:
    model.set_submodule("model.norm", copy.deepcopy(model.model.norm))


def another_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def trained_norms(model: Any) -> None:
    peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["norm"])).eval()


@feature("parts, norms, layers, hooks or weights changed later", "falls back", "norm")
@pytest.mark.parametrize(
    ("change", "gone"), [(another_norm, 1), (another_layer, 2), (trained_norms, 1)]
)
@torch.inference_mode()
def test_a_norm_that_another_takes_the_place_of_is_told(change: Any, gone: int) -> None:
    model = built("llama")
    before = model(TOKENS).logits
    with inside(RmsNorms(model), original_kernel("norm")) as book:
        change(model)
        assert torch.allclose(model(TOKENS).logits, before, rtol=1e-4, atol=1e-5)
        assert sum(book.calls.values()) == 5 - gone
        assert book.layers == LayerSurvey(5 - gone, Counter({REPLACED: gone}))
