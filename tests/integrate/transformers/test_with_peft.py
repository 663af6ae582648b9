"""Models of transformers in the hands of peft and accelerate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from feature_matrix import feature
from transformers_sample import (
    GPT_OSS,
    PER_LAYER,
    built,
    inside,
    logits,
    original_kernel,
    patched,
)

from patcher.bench import VerificationError

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(target_modules=["q_proj", "o_proj"]),
    "LoRA on experts": lambda: peft.LoraConfig(
        target_modules=[], target_parameters=["mlp.experts.down_proj"]
    ),
    "norms": lambda: peft.LNTuningConfig(
        target_modules=["input_layernorm", "post_attention_layernorm", "norm"]
    ),
    "saved norms": lambda: peft.LoraConfig(
        target_modules=["v_proj"], modules_to_save=["post_attention_layernorm"]
    ),
}


def adapted(model: Any, adapter: str) -> Any:
    """The model with an adapter that changes what it computes."""
    torch.manual_seed(1)
    made = peft.get_peft_model(model, ADAPTERS[adapter]()).eval()
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            parameter.data.uniform_(0.1, 0.3) if "lora" in name else parameter.data.mul_(3)
    return made


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(name, marks=feature(f"peft: {name}, off, merged", "right", *GPT_OSS))
        for name in ADAPTERS
    ],
)
def test_an_adapter_counts_and_every_call_is_counted(adapter: str) -> None:
    model = built()
    plain = logits(model)
    expected = logits(adapted(copy.deepcopy(model), adapter))
    assert not torch.allclose(expected, plain)
    with patched(model) as books:
        found = adapted(model, adapter)
        torch.testing.assert_close(logits(found), expected)
        for name, book in books.items():
            told = book.calls.total() + book.fallbacks.total()
            assert told == len(model.model.layers) * PER_LAYER[name], f"{name}: {book.fallbacks}"
        with found.disable_adapter():
            torch.testing.assert_close(logits(found), plain)
        merged = found.merge_and_unload()
        torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)


@feature("accelerate: offload and hooks, then removed", "right", *GPT_OSS)
@pytest.mark.parametrize("later", [False, True])
def test_offloaded_weights_are_those_of_the_layer(later: bool) -> None:
    """accelerate puts its hooks in the place of forwards, and moves weights at each call."""
    expected = logits(built())
    with patched(None if later else (model := built())) as books:
        if later:
            model = built()
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(logits(model), expected)
        for name, book in books.items():
            told = book.calls.total() + book.fallbacks.total()
            assert told == len(model.model.layers) * PER_LAYER[name], f"{name}: {book.fallbacks}"
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        torch.testing.assert_close(logits(model), expected)
        for name, book in books.items():
            told = book.calls.total() + book.fallbacks.total()
            assert told == 2 * len(model.model.layers) * PER_LAYER[name], (
                f"{name}: {book.fallbacks}"
            )
        before = [book.calls.total() + book.fallbacks.total() for book in books.values()]
    torch.testing.assert_close(logits(model), expected)
    assert [b.calls.total() + b.fallbacks.total() for b in books.values()] == before
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert not any(hasattr(type(module), "patch_point") for module in model.modules())
    assert set(books) == set(GPT_OSS)


@feature("`device_map`, offload: spread before it is patched", "refused", *GPT_OSS)
def test_a_spread_model_is_refused_by_what_spreads_it() -> None:
    model = built()
    places = {"model": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    for part in model.modules():
        accelerate.hooks.add_hook_to_module(part, accelerate.hooks.ModelHook())
    expected = logits(model)
    for name, point in GPT_OSS.items():
        with (
            pytest.raises(VerificationError, match="was replaced by a hook of accelerate"),
            inside(point(model), original_kernel(name)),
        ):
            pass
    torch.testing.assert_close(logits(model), expected)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    with patched(model) as books:
        torch.testing.assert_close(logits(model), expected)
    assert all(book.calls.total() for book in books.values())


@feature("FSDP2: sharded before it is patched", "refused", *GPT_OSS)
def test_layers_of_a_class_that_other_code_made_are_named() -> None:
    model = built()
    for layer in model.model.layers:  # as `fully_shard` does it
        own = type(layer)
        layer.__class__ = type(f"FSDP{own.__name__}", (own,), {})
    for name, point in GPT_OSS.items():
        with (
            pytest.raises(VerificationError, match="has made FSDPGptOssDecoderLayer of the model"),
            inside(point(model), original_kernel(name)),
        ):
            pass
