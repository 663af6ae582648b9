"""Residual addition and norm in one call, within a layer and from one layer to the next.

A layer runs a copy of its own text, in which each addition and the norm after it are one step here.
Its last addition goes with the norm that the next layer begins with, or with the last norm of all,
where the text of their body shows that the sum is handed on to that alone. The layer still returns
the true sum. Its norm waits for the next layer, which uses it only if it gets that same tensor.

The next layer writes to that sum in place, so no other code may hold it. Work in place is therefore
done only within the body's own forward, which holds none, and without hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch

from patcher.integrate.transformers.forwards import ForwardPatch
from patcher.integrate.transformers.onlookers import Modules, Onlookers
from patcher.integrate.transformers.parts import kind_of
from patcher.integrate.transformers.roles.norm import epsilon_of
from patcher.integrate.transformers.roles.residual_layers import (
    DecoderBody,
    norm_names,
    text_forward,
)
from patcher.integrate.transformers.swap import Forward


class ResidualStream:
    """What a body's layers hand on to each other.

    Threads may share the model. If their forwards overlap, a thread uses the original or a copy for
    the rest of its forward, never the other's tensors. If torch.compile compiles the whole forward,
    all this is decided during tracing and no state is stored.
    """

    def __init__(self, body: DecoderBody) -> None:
        """Set up for a body."""
        self.body = body
        self.waiting: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        """(sum, its norm, the module of that norm), passed from one layer to the next."""
        self._runner: int | None = None
        """The thread that runs the body's forward."""
        self._tracing = False
        """Whether torch.compile traces the body's forward."""

    def run(self, original: Forward, *args: Any, **more: Any) -> Any:
        """Run the body's own forward."""
        self.waiting = None
        if torch.compiler.is_compiling():
            self._tracing = True
            result = original(*args, **more)
            self._tracing, self.waiting = False, None
            return result
        self._runner = get_ident()
        try:
            return original(*args, **more)
        finally:
            self._runner = self.waiting = None

    def body_forward(self, original: Forward) -> Forward:
        """The forward of the body."""

        def forward(*args: Any, **more: Any) -> Any:
            return self.run(original, *args, **more)

        return forward

    def final_norm(self, norm: Any, original: Forward) -> Forward:
        """The forward of the norm after the last layer."""

        def forward(*args: torch.Tensor, **named: torch.Tensor) -> Any:
            [hidden_states] = *args, *named.values()
            waiting, self.waiting = self.waiting, None
            if waiting is not None and waiting[0] is hidden_states and waiting[2] is norm:
                return waiting[1]
            return original(hidden_states)

        return forward

    def refusal(self, index: int, layer: Any) -> str | None:
        """Why other code could observe work in place on what this layer gets; None if it could
        not."""
        compiling = torch.compiler.is_compiling()
        if not (self._tracing if compiling else self._runner == get_ident()):
            return "a layer is called on its own, or by several threads at a time"
        if "hidden_states" in (_recorded() or ()):
            return "hidden states are being recorded"
        layers = getattr(self.body.module, self.body.text.layers)
        if index >= len(layers) or layers[index] is not layer:
            return "the layers were put in another order"
        return None


class LayerSteps:
    """The additions and norms of one layer, as its rewritten text calls them."""

    def __init__(
        self,
        layer: Any,
        seam: ForwardPatch,
        norms: Mapping[type[torch.nn.Module], bool],
        stream: ResidualStream | None = None,
        index: int = 0,
    ) -> None:
        """Set up for a layer.

        Args:
            layer: the layer.
            seam: calls the kernel.
            norms: the classes of norms that were tried, and whether each returns the dtype of its
                input, whatever that of its weight.
            stream: what its body hands on; None where the layer stands alone.
            index: the layer's number in its body.
        """
        self._layer, self._seam, self._norms = layer, seam, norms
        self._stream, self._index = stream, index
        self._names = norm_names(layer)
        self._onlookers = Onlookers(self._watched, kind_of(layer), *norms)

    def forward(self, original: Forward) -> Forward:
        """The layer's new forward, which is its rewritten text."""
        layer, text = self._layer, text_forward(self._layer, self)

        def forward(*args: Any, **more: Any) -> Any:
            reason = self._refusal()
            if reason is None:
                return text(layer, *args, **more)
            if self._stream is not None:
                self._stream.waiting = None
            self._seam.refuse(reason, self._calls())
            return original(*args, **more)

        return forward

    def enter(self, hidden: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`kept = hidden; hidden = norm(hidden)`; what is kept is the layer's own."""
        if self._stream is not None:
            waiting, self._stream.waiting = self._stream.waiting, None
            if waiting is not None and waiting[0] is hidden and waiting[2] is norm:
                return hidden, waiting[1]
        # other code may still hold this tensor, so work in place uses a copy
        return hidden.clone(memory_format=torch.contiguous_format), norm(hidden)

    def middle(
        self, kept: torch.Tensor, added: torch.Tensor, norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden = kept + added; kept = hidden; hidden = norm(hidden)`."""
        if self._onlookers.keeps:
            added = added.clone()
        if self._add_norm(added, kept, norm):
            return kept, added
        kept = kept + added
        hidden = norm(kept)
        self._seam.left(hidden, kept)
        return kept, hidden

    def leave(self, kept: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """`kept + added`, of which the norm then waits."""
        following = self._following()
        if self._stream is None or following is None:
            return kept + added
        if self._onlookers.keeps:
            added = added.clone()
        if self._add_norm(added, kept, following):
            self._stream.waiting = (kept, added, following)
            return kept
        return kept + added

    def _following(self) -> Any:
        return None if self._stream is None else self._stream.body.following(self._index)

    def _calls(self) -> int:
        return len(self._names) - 1 + (self._following() is not None)

    def _watched(self) -> tuple[Modules, Modules]:
        parts = self._layer._modules
        norms = [parts[name] for name in self._names]
        if (following := self._following()) is not None:
            norms.append(following)
        others = (
            part for name, part in parts.items() if name not in self._names and part is not None
        )
        return (self._layer, *norms), tuple(others)

    def _refusal(self) -> str | None:
        """Why other code could observe work in place on this layer; None if it could not."""
        if torch.is_grad_enabled() or self._layer.training:
            return "gradients are on"
        reason = None
        if self._stream is not None:
            reason = self._stream.refusal(self._index, self._layer)
        return reason or self._onlookers.refusal()

    def _add_norm(self, added: torch.Tensor, kept: torch.Tensor, norm: Any) -> bool:
        """kept += added; added = norm(kept), in place; returns whether that was done."""
        weight, epsilon = norm.weight, epsilon_of(norm)
        if not (added.is_contiguous() and kept.is_contiguous()):
            reason = "not contiguous"
        elif added.shape != kept.shape:
            reason = "a sum of two shapes"
        elif weight.dtype != added.dtype and not self._norms.get(kind_of(norm)):
            reason = "weight in another dtype"
        elif epsilon is None:
            reason = "its epsilon is no number"
        else:
            size = added.shape[-1]
            return self._seam(added.view(-1, size), kept.view(-1, size), weight, epsilon)
        self._seam.refuse(reason)
        return False


def _recorded() -> Any:
    """What transformers records of the parts of a model in this call."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get()  # type: ignore[no-untyped-call]
