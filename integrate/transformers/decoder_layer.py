"""`gpt_oss.decoder_layer`: residual add and norm in one call, twice per layer.

Each decoder layer adds to its residual stream twice and normalises after each add. Each pair
becomes one call of the patched kernel: residual add + post-attention norm within a layer, and the
layer's last add + the next layer's (or the final) norm. A layer still returns the true hidden
state. Its norm is stored for the next layer, which uses it only if it receives that same tensor.

The next layer writes to that hidden state in place, so no other code may hold it. Work in place is
therefore done only within the model's own forward, which holds none, and without hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import (
    Forward,
    ForwardPatch,
    GptOssPoint,
    Onlookers,
    Swap,
)
from patcher.integrate.transformers.parts import check_kinds


class GptOssDecoderLayers(GptOssPoint):
    """Replaces the `forward` of the model's body, decoder layers and final norm.

    Threads may share the model. If their forwards overlap, a thread uses the original or a copy for
    the rest of its forward, never the other's tensors. If torch.compile compiles the whole forward,
    all this is decided during tracing and no state is stored.
    """

    name: ClassVar[str] = "gpt_oss.decoder_layer"
    op: ClassVar[str] = "fused_add_rms_norm"

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._runner: int | None = None
        """The thread that runs the body's forward."""
        self._tracing = False
        """Whether torch.compile traces the body's forward."""
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """(hidden state, its norm, its rows), passed from one layer to the next."""

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
        return [body, *layers, *norms]

    def swaps(self, body: Any, kernel: Dispatcher) -> Iterator[Swap]:
        from transformers.utils.output_capturing import _active_collector

        self._recording: Callable[[], Any] = _active_collector.get
        seam = ForwardPatch(kernel, _add_then_norm)
        layers = list(body.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), body.norm]
        for layer, norm in zip(layers, norms, strict=True):
            yield layer, self._layer_forward(layer, norm, seam)
        yield body.norm, self._final_norm(body.norm)
        yield body, self._body_forward(body)

    def remove(self) -> None:
        self._waiting = None
        super().remove()

    def _body_forward(self, body: Any) -> Forward:
        original = body.forward

        @functools.wraps(original)
        def forward(*args: Any, **rest: Any) -> Any:
            self._waiting = None
            if torch.compiler.is_compiling():
                self._tracing = True
                result = original(*args, **rest)
                self._tracing, self._waiting = False, None
                return result
            self._runner = get_ident()
            try:
                return original(*args, **rest)
            finally:
                self._runner = self._waiting = None

        return forward

    def _layer_forward(self, layer: Any, following: Any, seam: ForwardPatch) -> Forward:
        original = layer.forward
        middle = layer.post_attention_layernorm
        hidden_size = middle.weight.shape[0]
        onlookers = Onlookers(
            skipped=(layer, layer.input_layernorm, middle, following),
            seen=(*layer.self_attn.modules(), *layer.mlp.modules()),
        )

        def forward(
            hidden_states: torch.Tensor,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            use_cache: bool | None = False,
            position_embeddings: Any = None,
            **rest: Any,
        ) -> torch.Tensor:
            waiting, self._waiting = self._waiting, None
            rest |= {
                "attention_mask": attention_mask,
                "position_ids": position_ids,
                "past_key_values": past_key_values,
                "use_cache": use_cache,
                "position_embeddings": position_embeddings,
            }
            refusal = self._refuse(layer, onlookers)
            if refusal is not None:
                seam.refuse(refusal, 2)
                result: torch.Tensor = original(hidden_states, **rest)
                return result
            if waiting is not None and waiting[0] is hidden_states:
                residual, normed, rows = waiting
            else:
                normed = layer.input_layernorm(hidden_states)
                # other code may still hold this tensor, so work in place uses a copy
                residual = hidden_states.clone(memory_format=torch.contiguous_format)
                rows = residual.view(-1, hidden_size)
            attended, _ = layer.self_attn(hidden_states=normed, **rest)
            if _add_norm(seam, attended, rows, middle):
                hidden = attended
            else:
                residual = residual + attended
                rows = residual.view(-1, hidden_size)
                hidden = middle(residual)
            mixed, _ = layer.mlp(hidden)
            if _add_norm(seam, mixed, rows, following):
                self._waiting = (residual, mixed, rows)
                return residual
            total: torch.Tensor = residual + mixed
            return total

        return forward

    def _final_norm(self, norm: Any) -> Forward:
        original = norm.forward

        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting[0] is hidden_states:
                return waiting[1]
            result: torch.Tensor = original(hidden_states)
            return result

        return forward

    def _refuse(self, layer: Any, onlookers: Onlookers) -> str | None:
        """Why other code could observe work in place on this layer; None if it could not."""
        if torch.is_grad_enabled() or layer.training:
            return "gradients are on"
        compiling = torch.compiler.is_compiling()
        if not (self._tracing if compiling else self._runner == get_ident()):
            return "a layer is called on its own"
        if "hidden_states" in (self._recording() or ()):
            return "hidden states are being recorded"
        if onlookers.look():
            return "a module has hooks"
        return None


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
