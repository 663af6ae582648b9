"""`experts.sum`: the scaled sum over a token's chosen experts in one call of `moe_reduce`.

A module is taken if transformers' registry of experts functions runs it, with or without gates,
biases and norms, whichever way its weights lie, and if the copy of both functions up to the sum
gives on numbers, with the module's own weights, what they give. See `experts_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, why_not_now
from patcher.integrate.transformers.parts import UNTRIED, bare, sentence_of
from patcher.integrate.transformers.probed import ELSE
from patcher.integrate.transformers.roles.experts_modules import (
    alike,
    changed,
    not_in_memory,
    of_another_class,
    some_calls,
)
from patcher.integrate.transformers.roles.experts_point import ExpertsPoint
from patcher.integrate.transformers.roles.experts_rows import (
    ROWS,
    forward_with_sum,
    own_functions,
    weigh_and_sum,
)
from patcher.integrate.transformers.swap import Forward


class ExpertsSums(ExpertsPoint):
    """Replaces the `forward` of experts modules."""

    name: ClassVar[str] = "experts.sum"
    op: ClassVar[str] = "moe_reduce"
    wanted: ClassVar[str] = "that transformers' grouped_mm or batched_mm runs"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of transformers' functions, whose beginnings are copied, and of their end."""
        from transformers.integrations import moe

        return source_digest(
            *own_functions().values(), moe._batched_linear, moe._grouped_linear, weigh_and_sum
        )

    @staticmethod
    def original(*args: Any) -> None:
        weigh_and_sum(*args)

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        return of_another_class(layer) or not_in_memory(layer) or _tried(bare(layer))

    def would_take(self, layer: Any) -> bool:
        """See `ProbedPoint`."""
        return of_another_class(layer) is None

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        return forward_with_sum(part, seam, _refuse, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: what the kernel is passed are activations."""
        return {}


def _refuse(experts: Any, hidden: torch.Tensor) -> str | None:
    return why_not_now(hidden) or changed(experts)


@torch.no_grad()
def _tried(experts: Any) -> str | None:
    hidden, chosen, gains = some_calls(experts)
    for name, function in own_functions().items():
        try:
            expected = function(experts, hidden, chosen, gains)
            rows, row_map = ROWS[name](experts, hidden, chosen)
        except UNTRIED as error:
            return f"it cannot be tried alone: {sentence_of(error)}"
        weigh_and_sum(rows.unsqueeze(0), row_map, gains, got := torch.empty_like(hidden))
        if not alike(got, expected):
            return ELSE
    return None
