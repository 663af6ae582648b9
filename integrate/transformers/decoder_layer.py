"""`gpt_oss.decoder_layer`: residual add and norm in one call, twice per layer.

Each decoder layer adds to its residual stream twice and normalises after each add. Each pair
becomes one call of the patched kernel: residual add + post-attention norm within a layer, and the
layer's last add + the next layer's (or the final) norm. A layer still returns the true hidden
state. Its norm is stored for the next layer, which uses it only if it receives that same tensor.

The next layer writes to that hidden state in place, so no other code may hold it. Work in place is
therefore done only within the model's own forward, which holds none, and without hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.onlookers import Modules, Onlookers
from patcher.integrate.transformers.parts import check_kinds
from patcher.integrate.transformers.swap import Forward


class GptOssDecoderLayers(GptOssPoint):
    """Replaces the `forward` of the model's body, decoder layers and final norm.

    Threads may share the model. If their forwards overlap, a thread uses the original or a copy for
    the rest of its forward, never the other's tensors. If torch.compile compiles the whole forward,
    all this is decided during tracing and no state is stored.
    """

    name: ClassVar[str] = "gpt_oss.decoder_layer"
    op: ClassVar[str] = "fused_add_rms_norm"
    within: ClassVar[tuple[str, ...]] = ()
    calls_per_layer: ClassVar[int] = 2

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._runner: int | None = None
        """The thread that runs the body's forward."""
        self._tracing = False
        """Whether torch.compile traces the body's forward."""
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any] | None = None
        """(hidden state, its norm, its rows, the module of that norm), passed from one layer to
        the next."""

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the replaced classes."""
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        return source_digest(source.GptOssDecoderLayer, source.GptOssRMSNorm)

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        layers = list(body.layers)
        norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
        norms.append(body.norm)
        check_kinds(layers, source.GptOssDecoderLayer)
        check_kinds(norms, source.GptOssRMSNorm)
        return [*layers, *norms]

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        from transformers.utils.output_capturing import _active_collector

        self._recording: Callable[[], Any] = _active_collector.get
        for index, layer in enumerate(body.layers):
            yield layer, partial(self._layer_forward, body, index, layer, seam)
        yield body.norm, partial(self._final_norm, body.norm)

    @staticmethod
    def original(*args: Any) -> None:
        _add_then_norm(*args)

    def remove(self) -> None:
        self._waiting = None
        super().remove()

    def run(self, body: Any, original: Forward, *args: Any, **more: Any) -> Any:
        self._waiting = None
        if torch.compiler.is_compiling():
            self._tracing = True
            result = original(*args, **more)
            self._tracing, self._waiting = False, None
            return result
        self._runner = get_ident()
        try:
            return original(*args, **more)
        finally:
            self._runner = self._waiting = None

    def _layer_forward(
        self, body: Any, index: int, layer: Any, seam: ForwardPatch, original: Forward
    ) -> Forward:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        def watched() -> tuple[Modules, Modules]:
            skipped = layer, layer.input_layernorm, layer.post_attention_layernorm
            return (*skipped, _following(body, index)), (layer.self_attn, layer.mlp)

        onlookers = Onlookers(watched, source.GptOssDecoderLayer, source.GptOssRMSNorm)

        names, defaults = _arguments(source.GptOssDecoderLayer, source.GptOssAttention)

        def forward(hidden_states: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
            waiting, self._waiting = self._waiting, None
            rest = {**defaults, **dict(zip(names, args, strict=False)), **rest}
            refusal = self._refuse(body, index, layer, onlookers)
            if refusal is not None:
                seam.refuse(refusal, 2)
                result: torch.Tensor = original(hidden_states, **rest)
                return result
            middle, following = layer.post_attention_layernorm, _following(body, index)
            if (
                waiting is not None
                and waiting[0] is hidden_states
                and waiting[3] is layer.input_layernorm
            ):
                residual, normed, rows, _ = waiting
            else:
                normed = layer.input_layernorm(hidden_states)
                # other code may still hold this tensor, so work in place uses a copy
                residual = hidden_states.clone(memory_format=torch.contiguous_format)
                rows = residual.view(-1, residual.shape[-1])
            attended, _ = layer.self_attn(hidden_states=normed, **rest)
            if onlookers.keeps:
                attended = attended.clone()
            if _add_norm(seam, attended, rows, middle):
                hidden = attended
            else:
                residual = residual + attended
                rows = residual.view(-1, residual.shape[-1])
                hidden = middle(residual)
                seam.left(hidden, residual)
            mixed, _ = layer.mlp(hidden)
            if onlookers.keeps:
                mixed = mixed.clone()
            if _add_norm(seam, mixed, rows, following):
                self._waiting = (residual, mixed, rows, following)
                return residual
            total: torch.Tensor = residual + mixed
            return total

        return forward

    def _final_norm(self, norm: Any, original: Forward) -> Forward:
        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting[0] is hidden_states and waiting[3] is norm:
                return waiting[1]
            result: torch.Tensor = original(hidden_states)
            return result

        return forward

    def _refuse(self, body: Any, index: int, layer: Any, onlookers: Onlookers) -> str | None:
        """Why other code could observe work in place on this layer; None if it could not."""
        if torch.is_grad_enabled() or layer.training:
            return "gradients are on"
        compiling = torch.compiler.is_compiling()
        if not (self._tracing if compiling else self._runner == get_ident()):
            return "a layer is called on its own, or by several threads at a time"
        if "hidden_states" in (self._recording() or ()):
            return "hidden states are being recorded"
        if index >= len(body.layers) or body.layers[index] is not layer:
            return "the layers were put in another order"
        return onlookers.refusal()


def _arguments(layer: Any, attention: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """How a layer passes its arguments on to its attention; their names differ by version.

    Args:
        layer: the class of the layers.
        attention: the class of their attention.

    Returns:
        The names after the hidden states, in order, and the defaults of those for which the
        attention has none.
    """
    own = list(inspect.signature(layer.forward).parameters.values())[2:]
    named = [one for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
    taken = inspect.signature(attention.forward).parameters
    return tuple(one.name for one in named), {
        one.name: one.default
        for one in named
        if one.name not in taken or taken[one.name].default is inspect.Parameter.empty
    }


def _following(body: Any, index: int) -> Any:
    """The norm that the model has after a layer now."""
    last = index + 1 >= len(body.layers)
    return body.norm if last else body.layers[index + 1].input_layernorm


def _add_norm(seam: ForwardPatch, added: torch.Tensor, rows: torch.Tensor, norm: Any) -> bool:
    """rows += added; added = norm(rows), in place; returns whether that was done."""
    if not added.is_contiguous():
        seam.refuse("not contiguous")
        return False
    return seam(added.view(rows.shape), rows, norm.weight, norm.variance_epsilon)


def _add_then_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """The layer's own add and norm, with transformers' norm, in place."""
    from transformers.models.gpt_oss import modeling_gpt_oss as source

    residual += input
    norm: Any = SimpleNamespace(weight=weight, variance_epsilon=epsilon)
    input.copy_(source.GptOssRMSNorm.forward(norm, residual))
