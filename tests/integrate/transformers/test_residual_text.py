"""What the text of a layer and of what runs it says, and layers of someone else's text."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from tiny_roles import TOKENS, built, run_in
from transformers.models.llama import modeling_llama as source
from transformers_sample import inside, original_kernel

from patcher.bench import VerificationError
from patcher.integrate.transformers.roles.add_norm import AddNorms
from patcher.integrate.transformers.roles.residual_layers import body_text_of, text_of
from patcher.integrate.transformers.roles.residual_text import (
    BodyText,
    LayerText,
    body_text,
    layer_text,
)

LAYER = """
def forward(self, hidden, mask=None, **more):
    residual = hidden
    hidden = self.first(hidden)
    hidden, weights = self.attend(hidden, mask, **more)
    hidden = residual + hidden
    residual = hidden
    hidden = self.second(hidden)
    hidden = self.mlp(hidden)
    hidden = residual + hidden
    return hidden
"""
REWRITTEN = """
def forward(self, hidden, mask=None, **more):
    residual, hidden = patcher_steps.enter(hidden, self.first)
    hidden, weights = self.attend(hidden, mask, **more)
    residual, hidden = patcher_steps.middle(residual, hidden, self.second)
    hidden = self.mlp(hidden)
    hidden = patcher_steps.leave(residual, hidden)
    return hidden
"""


def read(text: str) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def changed(*changes: tuple[str, str], text: str = LAYER) -> ast.FunctionDef:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return read(text)


def test_additions_and_norms_are_steps_of_a_rewritten_text() -> None:
    found = layer_text(read(LAYER))
    assert isinstance(found, LayerText)
    assert (found.norms, found.hands_on) == (("first", "second"), True)
    assert ast.unparse(found.forward) == ast.unparse(read(REWRITTEN))


FITS = {
    "sums in another order": (
        ("residual + hidden\n    residual", "hidden + residual\n    residual"),
    ),
    "scaled": (("residual + hidden\n    return", "residual + hidden * self.scale\n    return"),),
    "dropped": (("residual + hidden\n    return", "residual + self.drop(hidden)\n    return"),),
    "a tuple": (("return hidden", "return (hidden, weights)"),),
    "a branch": (
        ("hidden = self.mlp(hidden)", "if self.wide:\n        hidden = self.mlp(hidden)"),
    ),
    "another name": (
        ("hidden, weights = self.attend", "attended, weights = self.attend"),
        ("residual + hidden", "residual + attended"),
    ),
    "its form": (
        ("residual + hidden\n    return", "residual + hidden.view(residual.shape)\n    return"),
    ),
}


@pytest.mark.parametrize("changes", FITS.values(), ids=FITS)
def test_other_texts_that_do_the_same_fit(changes: tuple[tuple[str, str], ...]) -> None:
    found = layer_text(changed(*changes))
    assert isinstance(found, LayerText), found
    assert found.hands_on


KEEPS = {
    "scaled after": "hidden *= self.scale",
    "clamped": "hidden = hidden.clamp(-1, 1)",
    "in a tuple": "outputs = (hidden,)",
    "in a branch": "if hidden.dtype == 'half':\n        hidden = hidden.float()",
}


@pytest.mark.parametrize("text", KEEPS.values(), ids=KEEPS)
def test_a_last_sum_that_is_changed_or_kept_is_not_handed_on(text: str) -> None:
    found = layer_text(changed(("return hidden", f"{text}\n    return hidden")))
    assert isinstance(found, LayerText)
    assert not found.hands_on


MLP = "hidden = self.mlp(hidden)"
OTHERS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "it adds to its residual in another way": (
        "",
        (
            ("residual + hidden\n    residual", "residual + hidden + 1\n    residual"),
            ("residual + hidden\n    return", "residual * hidden\n    return"),
        ),
    ),
    "no norm of the sum follows an addition": (
        "",
        (("    residual = hidden\n    hidden = self.s", "    hidden = self.s"),),
    ),
    "it reads its residual elsewhere": ("", ((MLP, "hidden = self.mlp(hidden, residual)"),)),
    "it returns before its last addition": ("", ((MLP, f"if self.no: return hidden\n    {MLP}"),)),
    "it reads attended again after an addition": (
        "",
        (
            ("hidden, weights = self.attend", "attended, weights = self.attend"),
            ("residual + hidden", "residual + attended"),
            (MLP, "hidden = self.mlp(hidden + attended)"),
        ),
    ),
    "it reads view again after an addition": (
        "",
        (
            ("hidden = residual", "view = hidden.view(-1)\n    hidden = residual"),
            (MLP, "hidden = self.mlp(view)"),
        ),
    ),
    "it adds what it was given": ("", ((MLP, "hidden = mask"),)),
    "it reads a private field": ("", ((MLP, "hidden = self.__mlp(hidden)"),)),
}


@pytest.mark.parametrize(("said", "case"), OTHERS.items())
def test_texts_in_which_a_kernel_may_not_write_are_told(
    said: str, case: tuple[str, tuple[tuple[str, str], ...]]
) -> None:
    assert layer_text(changed(*case[1])) == said


@pytest.mark.parametrize(
    "text", ["self.last = hidden", "kept[0] = hidden", "kept.append(hidden)", "(x := hidden)"]
)
@pytest.mark.parametrize("where", [MLP, "return hidden"])
def test_a_text_that_may_keep_a_state_elsewhere_is_told(text: str, where: str) -> None:
    changes = ((where, f"{text}\n    {where}"),)
    assert layer_text(changed(*changes)) == "it may keep a state elsewhere"


@pytest.mark.parametrize("added", ["self.bias", "mask", "mask[0]", "mask.view(-1)", "self.kept[0]"])
def test_what_others_hold_is_not_added_in_place(added: str) -> None:
    ways = (
        f"residual + {added}\n    return",
        f"x = {added}\n    hidden = residual + x\n    return",
    )
    text = changed(
        (MLP, f"x = {added}"), ("residual + hidden\n    return", "residual + x\n    return")
    )
    assert layer_text(text) == "it adds what it was given"
    text = changed(("residual + hidden\n    return", ways[0]))
    assert layer_text(text) == "it adds what it was given"


def test_a_forward_that_keeps_nothing_is_of_no_role() -> None:
    assert layer_text(read("def forward(self, x): return self.mlp(x)")) is None
    assert layer_text(read("def forward(self): pass")) is None


BODY = """
def forward(self, ids, **more):
    hidden = self.embed(ids)
    for layer in self.layers[:self.count]:
        hidden = layer(hidden, mask=None, **more)
    hidden = self.norm(hidden)
    return hidden
"""
BODIES: dict[str, tuple[tuple[tuple[str, str], ...], BodyText | None]] = {
    "as it is": ((), BodyText("layers", "norm")),
    "numbered": (
        (("layer in self.layers[:self.count]", "i, layer in enumerate(self.layers)"),),
        BodyText("layers", "norm"),
    ),
    "of a tuple": (
        (
            (
                "hidden = layer(hidden, mask=None, **more)",
                "out = layer(hidden)\n        hidden = out[0]",
            ),
        ),
        BodyText("layers", "norm"),
    ),
    "kept before the norm": (
        (("hidden = self.norm", "last = hidden\n    hidden = self.norm"),),
        BodyText("layers", None),
    ),
    "its states are kept": (
        (("hidden = layer", "kept.append(hidden)\n        hidden = layer"),),
        None,
    ),
    "its states are changed": (
        (("**more)\n    hidden", "**more)\n        hidden *= 2\n    hidden"),),
        None,
    ),
    "its layers run elsewhere, too": (
        (("for layer in", "for each in self.layers: kept.append(each(hidden))\n    for layer in"),),
        None,
    ),
    "it may end early": ((("hidden = layer", "if self.end: break\n        hidden = layer"),), None),
    "two layers a turn": (
        (("**more)\n    hidden", "**more)\n        hidden = layer(hidden)\n    hidden"),),
        None,
    ),
}


@pytest.mark.parametrize(("changes", "found"), BODIES.values(), ids=BODIES)
def test_what_runs_layers_is_known_where_it_only_hands_on(
    changes: tuple[tuple[str, str], ...], found: BodyText | None
) -> None:
    assert body_text(changed(*changes, text=BODY)) == found


# --- classes of someone else's


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **more: Any) -> Any:
        return forward(self, *args, **more) * 1

    return wrapper


def hidden_decorator(forward: Callable[..., Any]) -> Callable[..., Any]:
    class Wrapper:
        __wrapped__ = forward

        def __get__(self, instance: Any, kind: Any = None) -> Any:
            return self if instance is None else functools.partial(forward, instance)

    return Wrapper()  # type: ignore[return-value]  # as a compiled extension's would be


class Decorated(source.LlamaDecoderLayer):
    @decorated
    def forward(self, hidden_states: Any, scale: float = 2.0, **more: Any) -> Any:  # type: ignore[override]
        """Text that is indented
        less than its function."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **more)
        hidden_states = residual + hidden_states * scale
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states  # noqa: RET504


class Scaled(source.LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **more: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **more)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        hidden_states *= 0.5
        return hidden_states


class Own(source.LlamaDecoderLayer):
    def forward(self, hidden_states: Any, **more: Any) -> Any:  # type: ignore[override]
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(hidden_states=hidden_states, **more)[0]
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states  # noqa: RET504


class Called(source.LlamaDecoderLayer):
    def __call__(self, *args: Any, **more: Any) -> Any:
        return super().__call__(*args, **more).mul_(0.5)


class Unknown(source.LlamaDecoderLayer):
    forward = hidden_decorator(Decorated.forward)  # type: ignore[assignment]


def with_layers(kind: type[torch.nn.Module]) -> Any:
    model = built("llama")
    for layer in model.model.layers:
        layer.__class__ = kind
    return model


@pytest.mark.parametrize(("kind", "calls"), [(Own, 4), (Decorated, 2), (Called, 2), (Scaled, 2)])
def test_layers_of_other_code_run_the_kernel_as_far_as_their_text_goes(
    kind: type[torch.nn.Module], calls: int
) -> None:
    model = with_layers(kind)
    book, error = run_in(model, AddNorms(model))
    assert (book.calls.total(), dict(book.reasons)) == (calls, {})
    assert error < 1e-5


@torch.inference_mode()
def test_defaults_and_arguments_stay_those_of_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = with_layers(Decorated)
    forward = inspect.unwrap(Decorated.forward)
    monkeypatch.setattr(forward, "__defaults__", (3.0,))
    before, other = model(TOKENS).logits, model(TOKENS, scale=1.0).logits
    assert not torch.allclose(before, other, atol=1e-4)
    with inside(AddNorms(model), original_kernel("add_norm")) as book:
        assert torch.allclose(model(TOKENS).logits, before, rtol=1e-5, atol=1e-6)
        assert torch.allclose(model(TOKENS, scale=1.0).logits, other, rtol=1e-5, atol=1e-6)
        assert (book.calls.total(), book.reasons.total()) == (4, 0)


def test_a_decorator_that_cannot_be_copied_is_told() -> None:
    model = with_layers(Unknown)
    with pytest.raises(VerificationError, match="2: a decorator of its forward cannot be copied"):
        AddNorms(model).find()


def test_a_text_that_is_not_what_runs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(text_of(source.LlamaDecoderLayer), LayerText)
    assert body_text_of(source.LlamaModel) == BodyText("layers", "norm")
    own = inspect.unwrap(source.LlamaDecoderLayer.forward)
    at = {name: getattr(own.__code__, name) for name in ("co_filename", "co_firstlineno")}
    code = inspect.unwrap(Scaled.forward).__code__.replace(**at)
    other = FunctionType(code, own.__globals__)
    monkeypatch.setattr(source.LlamaDecoderLayer, "forward", other)
    assert text_of(source.LlamaDecoderLayer) is None, "its file was changed meanwhile"
    with pytest.raises(VerificationError, match="no decoder layer"):
        AddNorms(built("llama")).find()
    made = compile("def forward(self, x): return x", "<made at run time>", "exec")
    names: dict[str, Any] = {}
    exec(made, names)
    monkeypatch.setattr(source.LlamaDecoderLayer, "forward", names["forward"])
    assert text_of(source.LlamaDecoderLayer) is None
