"""Patch points in Hugging Face transformers, on a model that is already built.

`gpt_oss.decoder_layer`: each decoder layer adds to its residual stream twice and normalises after
each. Both pairs become one call of the patched kernel: residual add + post-attention norm within a
layer, and the layer's last add + the next layer's (or the final) norm. A layer still returns the
true hidden state; the norm made with it waits for the next layer, which takes it only when handed
that very tensor.

The next layer then writes to that hidden state, so nobody else may hold it: the work in place is
done only within the model's own forward, which keeps none, and only where no hook looks on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as nn_module

from bench import UsageError, VerificationError
from integrate.dispatch import Dispatcher
from integrate.points import PatchPoint, source_digest


class GptOssDecoderLayers:
    """One installation: a `forward` on the instances of body, decoder layers and final norm.

    Threads may share the model: one whose forward overlaps another's loses its place and takes the
    original or a copy for the rest of it, never the other's tensors.
    """

    engine: ClassVar[str] = "transformers"
    name: ClassVar[str] = "gpt_oss.decoder_layer"
    op: ClassVar[str] = "fused_add_rms_norm"

    def __init__(self, target: Any = None) -> None:
        """Get ready for this model; nothing is changed yet."""
        self._model = target
        self._runner: int | None = None
        """The thread that is in the body's forward."""
        self._waiting: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """(hidden state, its norm, its rows) handed from one layer to the next."""
        self._forwards: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
        """What is in."""

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the classes whose work is taken over."""
        from transformers.models.gpt_oss import modeling_gpt_oss as module

        return source_digest(module.GptOssDecoderLayer, module.GptOssRMSNorm)

    def find(self) -> str:
        """The part of the model that holds `layers` and `norm`.

        Raises:
            VerificationError: not a gpt-oss of transformers, or already patched by someone.
        """
        return f"{len(self._body().layers)} decoder layers of {type(self._model).__name__}"

    def install(self, kernel: Dispatcher) -> None:
        """Swap the forwards of this model's instances; cheap, so that arms can take turns.

        Raises:
            UsageError: installed already.
            VerificationError: someone else has patched the model meanwhile.
        """
        from transformers.utils.output_capturing import _active_collector

        if self._forwards:
            raise UsageError("the patch is installed already", "remove it first")
        body = self._body()
        self._recording: Callable[[], Any] = _active_collector.get
        self._dispatch = kernel
        layers = list(body.layers)
        norms = [*(layer.input_layernorm for layer in layers[1:]), body.norm]
        forwards: list[tuple[torch.nn.Module, Callable[..., Any]]] = [
            (layer, self._layer_forward(layer, norm))
            for layer, norm in zip(layers, norms, strict=True)
        ]
        forwards.append((body.norm, self._final_norm(body.norm)))
        forwards.append((body, self._body_forward(body)))
        self._forwards = forwards
        for module, forward in forwards:
            module.__dict__["forward"] = forward

    def remove(self) -> None:
        """Put everything back; once more is the same as once.

        Raises:
            VerificationError: someone put a forward of their own over ours; ours are out, theirs
                stays.
        """
        forwards, self._forwards = self._forwards, []
        self._waiting = None
        covered = []
        for module, forward in forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
            else:
                covered.append(type(module).__name__)
        if covered:
            raise VerificationError(
                f"{covered[0]} was patched by someone else while this patch was in",
                "take patches out in the reverse order; load the model again",
            )

    def _body(self) -> Any:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        model = self._model
        body: Any = getattr(model, "model", model)
        layers: list[Any] = list(getattr(body, "layers", ()))
        if not layers or any(type(layer) is not source.GptOssDecoderLayer for layer in layers):
            raise VerificationError(
                f"{type(model).__name__} has no gpt-oss decoder layers",
                "this patch is for transformers' GptOssForCausalLM",
            )
        norms = [n for x in layers for n in (x.input_layernorm, x.post_attention_layernorm)]
        norms.append(body.norm)
        if any(type(norm) is not source.GptOssRMSNorm for norm in norms):
            raise VerificationError(
                "a norm of the model is not transformers' GptOssRMSNorm",
                "build the model without replacing its norms",
            )
        for kind in (source.GptOssDecoderLayer, source.GptOssRMSNorm):
            # the fingerprint is of the file's text, and knows nothing of a later assignment
            if not _written_by_transformers(kind.forward):
                raise VerificationError(
                    f"{kind.__name__}.forward was replaced", "take the other patch out first"
                )
        for module in (body, *layers, *norms):
            if "forward" in module.__dict__:
                raise VerificationError(
                    f"{type(module).__name__} is patched already", "take the other patch out first"
                )
        return body

    def _body_forward(self, body: Any) -> Callable[..., Any]:
        original = body.forward

        @functools.wraps(original)
        def forward(*args: Any, **rest: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **rest)
            self._waiting = None
            self._runner = get_ident()
            try:
                return original(*args, **rest)
            finally:
                self._runner = self._waiting = None

        return forward

    def _layer_forward(self, layer: Any, following: Any) -> Callable[..., Any]:
        original = layer.forward
        dispatch, book = self._dispatch, self._dispatch.book
        middle = layer.post_attention_layernorm
        hidden_size = middle.weight.shape[0]
        watched = _hooks_that_look_on(layer, following)

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
            refusal = self._refuse(layer, watched)
            if refusal is not None:
                book.reasons[refusal] += 2
                result: torch.Tensor = original(hidden_states, **rest)
                return result
            if waiting is not None and waiting[0] is hidden_states:
                residual, normed, rows = waiting
            else:
                normed = layer.input_layernorm(hidden_states)
                # not ours: someone may still hold it, so the work in place is on a copy
                residual = hidden_states.clone(memory_format=torch.contiguous_format)
                rows = residual.view(-1, hidden_size)
            attended, _ = layer.self_attn(hidden_states=normed, **rest)
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
        if self._runner != get_ident():
            return "a layer is called on its own"
        if "hidden_states" in (self._recording() or ()):
            return "hidden states are being recorded"
        if any(watched):
            # transformers leaves its own hooks behind; they look only while it records
            for hooks in watched:
                for hook in hooks.values():
                    if getattr(hook, "__name__", "") != "output_capturing_hook":
                        return "a module has hooks"
        return None


POINTS: dict[str, type[PatchPoint]] = {GptOssDecoderLayers.name: GptOssDecoderLayers}
"""Patch points of this engine, by name."""


def _written_by_transformers(function: Any) -> bool:
    """Whether a function and all that it wraps come from the files of transformers."""
    import transformers

    home = Path(inspect.getfile(transformers)).parent
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not Path(code.co_filename).is_relative_to(home):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _hooks_that_look_on(layer: Any, following: Any) -> list[dict[int, Any]]:
    """The hooks that would miss a call, or be handed a tensor that is written to later.

    The dicts are live: a hook registered later is in them.
    """
    skipped = layer, layer.input_layernorm, layer.post_attention_layernorm, following
    inner = *layer.self_attn.modules(), *layer.mlp.modules()
    return [
        nn_module._global_forward_hooks,
        nn_module._global_forward_pre_hooks,
        *(module._forward_hooks for module in (*skipped, *inner)),
        *(module._forward_pre_hooks for module in skipped),
    ]


def _add_norm(dispatch: Dispatcher, added: torch.Tensor, rows: torch.Tensor, norm: Any) -> bool:
    """rows += added; added = norm(rows), in place, where the kernel may."""
    if not added.is_contiguous():
        dispatch.book.reasons["not contiguous"] += 1
        return False
    return dispatch(added.view(rows.shape), rows, norm.weight, norm.variance_epsilon)
