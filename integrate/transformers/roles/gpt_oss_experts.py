"""`gpt_oss.experts`: the scaled sum over a token's chosen experts, which ends the experts function.

transformers looks up experts functions by name in a registry (`ALL_EXPERTS_FUNCTIONS`) at each
call; `generate` switches from `grouped_mm` to `batched_mm` for decoding on a GPU. Other
implementations (`eager`, `deepgemm`, ...) end differently and run unchanged. This point is of
gpt-oss alone, and of models that are built later, too; `experts.sum` is of any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.parts import check_kinds
from patcher.integrate.transformers.roles.experts_rows import (
    check_registry,
    forward_with_sum,
    weigh_and_sum,
)


class GptOssExpertsFunction(GptOssPoint):
    """Replaces the `forward` of the experts modules."""

    name: ClassVar[str] = "gpt_oss.experts"
    op: ClassVar[str] = "moe_reduce"
    within: ClassVar[tuple[str, ...]] = "mlp", "experts"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of the source of the experts and of both functions, with what they call."""
        from transformers.integrations import moe
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        return source_digest(
            source.GptOssExperts,
            moe.batched_mm_experts_forward,
            moe.grouped_mm_experts_forward,
            moe._batched_linear,
            moe._grouped_linear,
            moe.use_experts_implementation,
        )

    def find(self) -> str:
        check_registry()
        return super().find()

    def install(self, kernel: Dispatcher) -> None:
        check_registry()
        super().install(kernel)

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        experts = [layer.mlp.experts for layer in body.layers]
        kind: Any = source.GptOssExperts  # its decorator drops the type
        check_kinds(experts, kind)
        return experts

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        for layer in body.layers:
            experts = layer.mlp.experts
            yield experts, partial(forward_with_sum, experts, seam, _refuse)

    @staticmethod
    def original(*args: Any) -> None:
        weigh_and_sum(*args)


def _refuse(experts: Any, hidden: torch.Tensor) -> str | None:
    if torch.is_grad_enabled():
        return "gradients are on"
    if hasattr(experts, "parametrizations"):
        return "experts' weights are parametrised"
    if len(experts.down_proj) != experts.config.num_local_experts:
        return "experts are spread over devices"
    return None
