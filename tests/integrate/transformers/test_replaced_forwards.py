"""Forwards that other code gives to a class of torch or transformers, before a patch or later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built
from transformers import activations
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama as source
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.integrate.transformers.points import POINTS


@pytest.fixture(autouse=True)
def compiled_code_of_no_other_test() -> Iterator[None]:
    """Code that is compiled anew too often is no longer compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


CLASSES: dict[str, tuple[str, type[torch.nn.Module], int]] = {
    "its own": ("add_norm", source.LlamaDecoderLayer, 4),
    "of a norm inside": ("add_norm", source.LlamaRMSNorm, 4),
    "of each norm": ("norm", source.LlamaRMSNorm, 5),
    "of an MLP": ("gated_mlp", source.LlamaMLP, 2),
    "of an activation": ("gated_mlp", activations.SiLUActivation, 2),
    "of a linear layer": ("linear", torch.nn.Linear, 15),
}
"""The point, the class whose forward is replaced, and the calls of the point in a step."""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "kind", "calls"), CLASSES.values(), ids=CLASSES)
@torch.inference_mode()
def test_a_forward_that_a_class_gets_later_is_the_one_that_runs(
    name: str,
    kind: type[torch.nn.Module],
    calls: int,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = kind.forward

    def doubled(self: Any, *args: Any, **more: Any) -> Any:
        return own(self, *args, **more) * 2

    model = built("llama")
    before = model(TOKENS).logits
    with inside(POINTS[name](model), original_kernel(name)) as book:
        if not compiled:
            model(TOKENS)
            assert (book.calls.total(), book.reasons.total()) == (calls, 0)
        monkeypatch.setattr(kind, "forward", doubled)
        run = torch.compile(model, backend="eager") if compiled else model
        during = run(TOKENS).logits
        assert sum(n for said, n in book.reasons.items() if "was replaced" in said) == calls
    expected = model(TOKENS).logits
    assert not torch.allclose(expected, before, rtol=1e-3)
    assert torch.allclose(during, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["forward", "patch"])
@torch.inference_mode()
def test_what_a_replaced_forward_holds_is_not_written_to(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that gives each token the mean of others does."""
    mean = torch.linspace(-1.0, 1.0, 64).view(1, 1, 64)
    held = mean.clone()

    def constant(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return held.expand_as(hidden)

    model, token = built("llama"), TOKENS[:1, :1]
    if first == "forward":
        monkeypatch.setattr(source.LlamaMLP, "forward", constant)
    with inside(POINTS["add_norm"](model), original_kernel("add_norm")) as book:
        if first == "patch":
            model(token)
            monkeypatch.setattr(source.LlamaMLP, "forward", constant)
        during = model(token).logits
        assert held.equal(mean)
        assert book.reasons.total() == 0
    assert torch.allclose(during, model(token).logits, rtol=1e-4, atol=1e-5)


class Keeping(modeling_gpt_oss.GptOssModel):
    """Keeps what each layer gives, which the next one would write to."""

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        angles = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        self.kept = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles)
            self.kept.append(hidden)
        hidden = self.norm(hidden)
        return modeling_gpt_oss.MoeModelOutputWithPast(last_hidden_state=hidden)


@pytest.mark.parametrize("by", ["a subclass", "a forward"])
@torch.inference_mode()
def test_a_body_that_may_keep_states_is_refused_and_its_states_stay(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("gpt_oss")
    if by == "a subclass":
        model.model.__class__ = Keeping
    else:
        monkeypatch.setattr(modeling_gpt_oss.GptOssModel, "forward", Keeping.forward)
    with pytest.raises(VerificationError, match=r"\.forward is not what the patch was made for"):
        POINTS["gpt_oss.decoder_layer"](model).find()
    model(TOKENS)
    before = [each.clone() for each in model.model.kept]
    with inside(POINTS["add_norm"](model), original_kernel("add_norm")) as book:
        model(TOKENS)
    assert (book.calls.total(), book.reasons.total()) == (2, 0), "within each layer"
    for each, then in zip(model.model.kept, before, strict=True):
        assert torch.allclose(each, then, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "file"),
    [
        ("llama", "rotation", source),
        ("gpt_oss", "rotation", modeling_gpt_oss),
        ("gpt_oss", "gpt_oss.rotary_embedding", modeling_gpt_oss),
    ],
)
@torch.inference_mode()
def test_a_function_that_a_file_gets_later_is_the_one_that_runs(
    kind: str, name: str, file: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = file.apply_rotary_pos_emb

    def longer(*args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = own(*args, **more)
        return query * 4, key

    model = built(kind)
    before = model(TOKENS).logits
    with inside(POINTS[name](model), original_kernel(name)) as book:
        if not compiled:
            model(TOKENS)
            assert (book.calls.total(), book.reasons.total()) == (2, 0)
        monkeypatch.setattr(file, "apply_rotary_pos_emb", longer)
        run = torch.compile(model, backend="eager") if compiled else model
        during = run(TOKENS).logits
        assert sum(n for said, n in book.reasons.items() if "was replaced" in said) == 2
    expected = model(TOKENS).logits
    assert not torch.allclose(expected, before, rtol=1e-3)
    assert torch.allclose(during, expected, rtol=1e-4, atol=1e-5)
