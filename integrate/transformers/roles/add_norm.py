"""`add_norm`: each residual addition of a model and the RMSNorm after it in one call of
`fused_add_rms_norm`, whatever the class of the layers.

A layer is taken for its text and its norms. Its forward adds and normalises as `residual_text`
says, and runs a copy of that text. Its norms are tried on numbers, as those of `norm` are. The last
addition of a layer is in it where the text of the module that runs the layers shows which norm
comes next; else that addition stays the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch
from patcher.integrate.transformers.parts import bare, kind_of, refuse_replaced, sentence_of
from patcher.integrate.transformers.probed import ProbedPoint, with_other_weights
from patcher.integrate.transformers.roles.norm import FORMULAS, computes_norm
from patcher.integrate.transformers.roles.residual_layers import Layers, find_layers
from patcher.integrate.transformers.roles.residual_stream import LayerSteps, ResidualStream
from patcher.integrate.transformers.swap import Forward, ModuleSwap


class AddNorms(ProbedPoint):
    """Replaces the `forward` of decoder layers, of what runs them, and of the last norm."""

    name: ClassVar[str] = "add_norm"
    op: ClassVar[str] = "fused_add_rms_norm"
    role, others = "decoder layer", "layers"
    wanted: ClassVar[str] = "that takes an RMSNorm of a sum with its residual"

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._found = Layers()
        self._norms: dict[type[torch.nn.Module], bool] = {}
        """The classes of the norms that were tried, and whether each returns the dtype of its
        input, whatever that of its weight."""
        self._streams: list[ResidualStream] = []

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a layer has to compute: text and norms of each are tried, so no other
        source matters."""
        return source_digest(_add_then_norm)

    @staticmethod
    def original(*args: Any) -> None:
        _add_then_norm(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`: a norm that is taken with the addition before it, or a decoder layer
        that keeps its own."""
        return layer in self._found.norms or layer in self._found.refused

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return part in self._found.norms

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        return self._found.refused.get(layer)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`."""
        weight = getattr(layer, "weight", None)  # a layer that keeps its own additions has none
        return {} if weight is None else {"weight": weight}

    def would_take_of(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """See `ProbedPoint`: the norms."""
        return [*find_layers(model, _would_be_norm).norms]

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`: the forward of a layer whose last addition is the model's own."""
        return LayerSteps(part, seam, self._norms).forward(original)

    def remove(self) -> None:
        for stream in self._streams:
            stream.waiting = None
        super().remove()

    def _parts(self) -> list[torch.nn.Module]:
        try:
            self._found = find_layers(self.target, self._is_norm)
        except RuntimeError as error:  # its parts do not fit together outside the whole model
            raise VerificationError(
                f"a norm cannot be tried alone: {sentence_of(error)}",
                "patch the model before it is sharded or converted",
            ) from error
        for module in (*self._found.calls, *(body.module for body in self._found.bodies)):
            refuse_replaced(module)
        for layer in self._found.calls:
            _refuse_patched(layer)
        return super()._parts()

    def _swaps_for(self, kernel: Dispatcher) -> list[ModuleSwap]:
        self._parts()
        self._count(kernel, [(layer, norm) for norm, layer in self._found.norms.items()])
        seam, found = ForwardPatch(kernel, self.original), self._found
        streams, swaps = dict[int, ResidualStream](), list[ModuleSwap]()
        for body in found.bodies:
            stream = ResidualStream(body)
            streams[id(body)] = stream
            swaps += stream_swaps(stream, self)
        for layer, calls in found.calls.items():
            steps = LayerSteps(layer, seam, self._norms)
            if layer in found.places:
                body, index = found.places[layer]
                steps = LayerSteps(layer, seam, self._norms, streams[id(body)], index)
            refuse = partial(seam.refuse, calls=calls)
            swaps.append(ModuleSwap(layer, steps.forward, self, refuse))
        self._streams = [*streams.values()]
        return swaps

    def _is_norm(self, norm: Any) -> bool:
        refuse_replaced(norm)
        _refuse_patched(norm)
        tried = bare(norm)
        if not computes_norm(tried, FORMULAS["rms_norm"]):
            return False
        self._norms[kind_of(norm)] = keeps_dtype(tried)
        return True


def _would_be_norm(norm: Any) -> bool:
    return computes_norm(with_other_weights(norm), FORMULAS["rms_norm"])


def _refuse_patched(module: Any) -> None:
    if type(module) is not kind_of(module):
        raise VerificationError(
            f"{kind_of(module).__name__} is already patched", "remove the other patch first"
        )


def stream_swaps(stream: ResidualStream, point: object) -> list[ModuleSwap]:
    """The new forwards of a body and of its last norm; the layers count their calls."""
    swaps = [ModuleSwap(stream.body.module, stream.body_forward, point, _ignore)]
    if (norm := stream.body.last_norm()) is not None:
        swaps.append(ModuleSwap(norm, partial(stream.final_norm, norm), point, _ignore))
    return swaps


def _ignore(reason: str) -> None:
    """A call of a copy of the body or of its last norm: the layers count theirs."""


@torch.no_grad()
def keeps_dtype(norm: Any) -> bool:
    """Whether a norm returns the dtype of its input where its weight is float32."""
    tried = bare(norm)
    tried._parameters = {"weight": norm.weight.float()}
    rows = torch.ones(1, norm.weight.numel(), dtype=torch.bfloat16, device=norm.weight.device)
    return bool(tried(rows).dtype == rows.dtype)


def _add_then_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    residual += input
    wide = residual.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    input.copy_(weight.float() * (wide * scale))
