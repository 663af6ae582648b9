"""Patch points in Hugging Face transformers, on a model that is already built.

`gpt_oss.decoder_layer`: each decoder layer adds to its residual stream twice and normalises after
each. Both pairs become one call of the patched kernel: residual add + post-attention norm within a
layer, and the layer's last add + the next layer's (or the final) norm. A layer still returns the
true hidden state; the norm made with it waits for the next layer, which takes it only when handed
that very tensor.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from bench import UsageError, VerificationError
from integrate.dispatch import AddNormDispatcher, ReceiptBook


class GptOssDecoderLayers:
    """One installation: instance-level `forward` on every decoder layer and on the final norm."""

    point: ClassVar[str] = "gpt_oss.decoder_layer"

    def __init__(self, model: torch.nn.Module, dispatch: AddNormDispatcher) -> None:
        """Get ready for this model; nothing is changed yet.

        Raises:
            VerificationError: see `find`.
        """
        from transformers.utils.output_capturing import _active_collector

        body = self.find(model)
        self._dispatch = dispatch
        self._recording: Callable[[], Any] = _active_collector.get
        """What transformers collects while it runs."""
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """(hidden state, its norm, its rows) handed from one layer to the next."""
        self._installed = False
        layers = list(body.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), body.norm]
        self._forwards: list[tuple[torch.nn.Module, Callable[..., Any]]] = [
            (layer, self._layer_forward(layer, norm, first=layer is layers[0]))
            for layer, norm in zip(layers, norms, strict=True)
        ]
        self._forwards.append((body.norm, self._final_norm(body.norm)))

    @staticmethod
    def fingerprint() -> str:
        """sha256 of the source of the classes whose work is taken over."""
        from transformers.models.gpt_oss import modeling_gpt_oss as module

        classes = (module.GptOssDecoderLayer, module.GptOssRMSNorm)
        return hashlib.sha256("".join(map(inspect.getsource, classes)).encode()).hexdigest()

    @staticmethod
    def find(model: torch.nn.Module) -> Any:
        """The part of the model that holds `layers` and `norm`.

        Raises:
            VerificationError: not a gpt-oss of transformers, or already patched by someone.
        """
        body: Any = getattr(model, "model", model)
        layers: list[Any] = list(getattr(body, "layers", ()))
        names = {type(layer).__name__ for layer in layers}
        if names != {"GptOssDecoderLayer"}:
            raise VerificationError(
                f"{type(model).__name__} has no gpt-oss decoder layers",
                "this patch is for transformers' GptOssForCausalLM",
            )
        norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
        for module in (*layers, *norms, body.norm):
            if "forward" in module.__dict__:
                raise VerificationError(
                    f"{type(module).__name__} is patched already", "take the other patch out first"
                )
        return body

    def install(self) -> None:
        """Swap the forwards of this model's instances; cheap, so that arms can take turns.

        Raises:
            UsageError: installed already.
            VerificationError: someone else has patched the model meanwhile.
        """
        if self._installed:
            raise UsageError("the patch is installed already", "remove it first")
        if any("forward" in module.__dict__ for module, _ in self._forwards):
            raise VerificationError("the model is patched already", "take the other patch out")
        self._installed = True
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Put everything back; once more is the same as once."""
        if self._installed:
            for module, _ in self._forwards:
                del module.__dict__["forward"]
        self._installed = False
        self._waiting = None

    def __enter__(self) -> ReceiptBook:
        self.install()
        return self._dispatch.book

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def _layer_forward(self, layer: Any, following: Any, *, first: bool) -> Callable[..., Any]:
        original = layer.forward
        dispatch, book = self._dispatch, self._dispatch.book
        middle = layer.post_attention_layernorm
        hidden_size = middle.weight.shape[0]
        watched = [
            hooks
            for module in (layer, layer.input_layernorm, middle, following)
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

        def forward(
            hidden_states: torch.Tensor, attention_mask: Any = None, **rest: Any
        ) -> torch.Tensor:
            if first:
                self._waiting = None  # left over from a forward that was broken off
            waiting, self._waiting = self._waiting, None
            refusal = self._refuse(layer, watched)
            if refusal is not None:
                book.fallbacks[refusal] += 2
                result: torch.Tensor = original(hidden_states, attention_mask, **rest)
                return result
            if waiting is not None and waiting[0] is hidden_states:
                residual, normed, rows = waiting
            else:
                normed = layer.input_layernorm(hidden_states)
                # not ours: someone may still hold it, so the work in place is on a copy
                residual = hidden_states.clone(memory_format=torch.contiguous_format)
                rows = residual.view(-1, hidden_size)
            attended, _ = layer.self_attn(
                hidden_states=normed, attention_mask=attention_mask, **rest
            )
            if _add_norm(dispatch, attended, rows, middle):
                hidden = attended
            else:
                residual = residual + attended
                rows = residual.view(-1, hidden_size)
                hidden = middle(residual)
            mixed, _ = layer.mlp(hidden)
            if _add_norm(dispatch, mixed, rows, following):
                self._waiting = (residual, mixed, rows)
                return residual
            total: torch.Tensor = residual + mixed
            return total

        return forward

    def _final_norm(self, norm: Any) -> Callable[..., Any]:
        original = norm.forward

        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            waiting, self._waiting = self._waiting, None
            if waiting is not None and waiting[0] is hidden_states:
                return waiting[1]
            result: torch.Tensor = original(hidden_states)
            return result

        return forward

    def _refuse(self, layer: Any, watched: list[dict[int, Any]]) -> str | None:
        """Why in-place work on this layer could be seen by someone."""
        if torch.is_grad_enabled() or layer.training:
            return "gradients are on"
        if torch.compiler.is_compiling():
            return "under torch.compile"
        if "hidden_states" in (self._recording() or ()):
            return "hidden states are being recorded"
        for hooks in watched:
            # transformers leaves its own hooks behind; they look only while it records
            for hook in hooks.values():
                if getattr(hook, "__name__", "") != "output_capturing_hook":
                    return "a module has hooks"
        return None


POINTS = {GptOssDecoderLayers.point: GptOssDecoderLayers}
"""Patch points of this engine, by name."""


def _add_norm(
    dispatch: AddNormDispatcher, added: torch.Tensor, rows: torch.Tensor, norm: Any
) -> bool:
    """rows += added; added = norm(rows), in place, where the kernel may."""
    if not added.is_contiguous():
        dispatch.book.fallbacks["not contiguous"] += 1
        return False
    return dispatch(added.view(rows.shape), rows, norm.weight, norm.variance_epsilon)
