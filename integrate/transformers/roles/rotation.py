"""`rotation`: query and key of an attention rotated by one call of `rope`, in whatever model.

The attention's code is transformers' own: a copy of its forward calls another function in place of
`apply_rotary_pos_emb`. Query and key are turned where they are if they are dense and nothing else
sees them, as in most models; a part of each head, or a slice of a wider projection, is copied
first. The KV cache stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.copied_forward import forward_with_function
from patcher.integrate.transformers.forwards import ForwardPatch, why_not_now
from patcher.integrate.transformers.onlookers import Onlookers
from patcher.integrate.transformers.parts import kind_of
from patcher.integrate.transformers.probed import ProbedPoint
from patcher.integrate.transformers.roles.rotation_probe import (
    HeadRotation,
    axis_of,
    further_arguments,
    joined,
    rotate,
    rotations_of,
    rows,
    turn_of,
    whole,
)
from patcher.integrate.transformers.roles.rotation_table import SharedTable
from patcher.integrate.transformers.swap import Forward, ModuleSwap


class Rotations(ProbedPoint):
    """Replaces the `forward` of attentions by one with another rotation."""

    name: ClassVar[str] = "rotation"
    op: ClassVar[str] = "rope"
    role, others = "attention", "layers"
    wanted: ClassVar[str] = "whose rotation turns the halves of a head"

    def __init__(self, target: Any = None) -> None:
        super().__init__(target)
        self._turns: dict[torch.nn.Module, HeadRotation | str] = {}
        self._table = SharedTable()

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a module has to compute: each is tried, so no other source matters."""
        return source_digest(rotate)

    @staticmethod
    def original(*args: Any) -> None:
        rotate(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return bool(rotations_of(kind_of(layer)))

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return isinstance(self._turn_of(part), HeadRotation)

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        found = self._turn_of(layer)
        return found if isinstance(found, str) else None

    def would_take(self, layer: Any) -> bool:
        """See `ProbedPoint`."""
        return self.computes(layer)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: what the kernel is passed are activations."""
        return {}

    def remove(self) -> None:
        self._table.kept = None
        super().remove()

    def _turn_of(self, attention: Any) -> HeadRotation | str:
        if attention not in self._turns:
            self._turns[attention] = turn_of(attention, rotaries_of(self.target))
        return self._turns[attention]

    def _parts(self) -> list[torch.nn.Module]:
        self._turns = {}
        return super()._parts()

    def _swaps_for(self, kernel: Dispatcher) -> list[ModuleSwap]:
        swaps = super()._swaps_for(kernel)
        if "forward" in self.target.__dict__:  # torch.compile's or accelerate's, which hides ours
            return swaps
        model = ModuleSwap(
            self.target, lambda original: partial(self._table.run, original), self, _seen
        )
        return [*swaps, model]

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        turn = self._turn_of(part)
        assert isinstance(turn, HeadRotation), "a part that is patched was tried"
        return forward_with_function(
            part,
            turn.name,
            lambda own: self._rotation(part, turn, own, seam),
            seam.refuse,
            original,
        )

    def _rotation(
        self, attention: Any, turn: HeadRotation, original: Callable[..., Any], seam: ForwardPatch
    ) -> Forward:
        # a hook of a projection would see its output change
        onlookers = Onlookers(lambda: ((), tuple(attention.children())))
        further = further_arguments(original)

        def rotation(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
            refusal = why_not_now(q) or onlookers.refusal() or turn.unlike(q, k, cos)
            if refusal is None and axis_of(further, rest, named) in (None, turn.axis):
                query, key = (rows(each, turn, copied=onlookers.keeps) for each in (q, k))
                table = self._table.of(
                    cos,
                    (query.shape[0] * query.shape[1], turn.size),
                    partial(joined, turn, cos, sin, len(query)),
                )
                if seam(query.flatten(0, 1), key.flatten(0, 1), table):
                    return whole(query, q, turn), whole(key, k, turn)
            else:
                seam.refuse(refusal or "query, key or cosines of other axes")
            return original(q, k, cos, sin, *rest, **named)

        return rotation


def rotaries_of(model: Any) -> list[torch.nn.Module]:
    """The modules of a model that give cosines and sines by positions."""
    return [each for each in model.modules() if "RotaryEmbedding" in kind_of(each).__name__]


def _seen(reason: str) -> None:
    """The model's own forward: its layers count their calls."""
