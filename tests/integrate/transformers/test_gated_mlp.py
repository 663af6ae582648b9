"""The role of a gated MLP's activation, in models of several kinds: by source and by a probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import KINDS, MORE, SIZES, model_of
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError, load_op, presets
from patcher.bench.engines.architecture import full_config
from patcher.integrate.layers import LayerSurvey
from patcher.integrate.transformers.mlp_classes import is_product
from patcher.integrate.transformers.places import of_model
from patcher.integrate.transformers.points import POINTS
from patcher.integrate.transformers.roles.gated_mlp import GatedMlps
from patcher.places import places_in

TOKENS = torch.arange(1, 17).view(2, 8)


def built(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    settings = {**SIZES, **{**KINDS, **MORE}.get(kind, {}), **more}
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


# a layer of experts has one MLP that every token goes through
@pytest.mark.parametrize("kind", ["llama", "deepseek_v2", "qwen3_next"])
@torch.inference_mode()
def test_every_mlp_of_a_model_runs_the_kernel(kind: str) -> None:
    model = built(kind)
    before = model(TOKENS).logits
    point = GatedMlps(model)
    assert point.find() == f"2 instances in {type(model).__name__}"
    with inside(point, original_kernel("gated_mlp")) as book:
        during = model(TOKENS).logits
    assert (sum(book.calls.values()), sum(book.reasons.values())) == (2, 0)
    assert book.layers == LayerSurvey(taken=2)
    assert torch.allclose(during, before, rtol=1e-4, atol=1e-5)
    assert model(TOKENS).logits.equal(before), "without the patch the same bits"
    assert not any("patch_point" in vars(type(each)) for each in model.modules())


@torch.inference_mode()
def test_the_kernel_is_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    mlp = model.model.layers[0].mlp
    with inside(GatedMlps(model), original_kernel("gated_mlp")):
        assert mlp(torch.ones(2, 64)).ne(0).any()
    monkeypatch.setattr(GatedMlps, "original", staticmethod(lambda gate, up, out: out.zero_()))
    with inside(GatedMlps(model), original_kernel("gated_mlp")):
        assert mlp(torch.ones(2, 64)).eq(0).all()


@pytest.mark.parametrize("kind", ["gemma3_text", "phi3", "deepseek_v4", "falcon_h1", "gpt2"])
def test_mlps_that_compute_something_else_stay(kind: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"no MLP whose activation is silu\(gate\)"):
        GatedMlps(built(kind)).find()
    model = model_of(tmp_path, kind, **{**KINDS, **MORE}.get(kind, {}))
    with pytest.raises(VerificationError, match=f"no MLP of {kind} in transformers"):
        of_model("gated_mlp", lambda: full_config(model))


@pytest.mark.parametrize("kind", ["llama", "glm4_moe", "qwen3_moe"])
def test_a_config_tells_what_a_model_has(kind: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, kind, **{**KINDS, **MORE}[kind])
    if kind == "qwen3_moe":  # its layers are all of experts, though its file has an MLP
        with pytest.raises(VerificationError, match="no MLP of qwen3_moe"):
            of_model("gated_mlp", lambda: full_config(model))
    else:
        assert "MLP" in of_model("gated_mlp", lambda: full_config(model))


def test_presets_are_asked_alike() -> None:
    op = load_op("silu_and_mul")
    found = {
        name for name in presets() if (places := places_in(name, "transformers")) and places(op)[0]
    }
    assert {"llama-3.1-8b", "qwen3-8b", "glm-4.7-flash", "deepseek-v3-cut"} <= found
    assert not {"gpt-oss-20b", "gemma-3-27b", "mixtral-8x7b", "qwen3-30b-a3b"} & found


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("    def forward(self, x):\n        return {}", True),
        ("    def forward(self, x):\n        y = {}\n        return y", True),
        ("    def forward(self, x):\n        return {} + x", False),
        ("    def forward(self, x):\n        x = x.clamp(max=1)\n        return {}", False),
        ("    def forward(self, x, scale=1):\n        return {}", False),
    ],
)
def test_a_forward_is_the_product_alone(source: str, said: bool) -> None:
    product = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    assert is_product(source.format(product)) == said


def test_gradients_and_hooks_of_the_activation_run_the_models_own() -> None:
    model = built("llama")
    mlp = model.model.layers[0].mlp
    seen: list[int] = []
    with inside(GatedMlps(model), original_kernel("gated_mlp")) as book:
        assert mlp(torch.ones(1, 64)).requires_grad
        with torch.no_grad():
            hook = mlp.act_fn.register_forward_hook(lambda *_: seen.append(1))
            mlp(torch.ones(1, 64))
            hook.remove()
            mlp(torch.ones(1, 64))
    assert seen == [1]
    assert dict(book.reasons) == {"gradients are on": 1, "a module has hooks": 1}
    assert sum(book.calls.values()) == 1


def test_without_a_model_the_way_is_named() -> None:
    with pytest.raises(VerificationError, match="in a built model alone"):
        GatedMlps().install(original_kernel("gated_mlp"))
    assert POINTS["gated_mlp"] is GatedMlps
