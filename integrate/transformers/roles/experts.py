"""`gpt_oss.experts`: the scaled sum over a token's chosen experts, which ends the experts function.

transformers looks up experts functions by name in a registry (`ALL_EXPERTS_FUNCTIONS`) at each
call; `generate` switches from `grouped_mm` to `batched_mm` for decoding on a GPU. Other
implementations (`eager`, `deepgemm`, ...) end differently and run unchanged. This point is of
gpt-oss alone, and of models that are built later, too; `experts.sum` is of any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.parts import check_kinds
from patcher.integrate.transformers.roles.experts_rows import (
    ROWS,
    check_registry,
    own_functions,
    weigh_and_sum,
)
from patcher.integrate.transformers.swap import Forward


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


def forward_with_sum(
    experts: Any,
    seam: ForwardPatch,
    refuse: Callable[[Any, torch.Tensor], str | None],
    original: Forward,
) -> Forward:
    """The forward of an experts module whose sum is the kernel's.

    Args:
        experts: the module.
        seam: calls the kernel.
        refuse: says why a call with this input runs the module's own code; None if it does not.
        original: the module's own forward.
    """
    functions = own_functions()

    def forward(*args: Any, **more: Any) -> torch.Tensor:
        name = experts.config._experts_implementation
        hidden = args[0] if args else more["hidden_states"]
        refusal = unlike_its_own(name, functions) or refuse(experts, hidden)
        if refusal is not None:
            seam.refuse(refusal)
            result: torch.Tensor = original(*args, **more)
            return result
        return _run(experts, name, seam, *args, **more)

    return forward


def unlike_its_own(name: str, functions: dict[str, Callable[..., torch.Tensor]]) -> str | None:
    """Why the implementation of that name is not one of transformers' own functions."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if name not in functions:
        return f"experts implementation {name}"
    if ALL_EXPERTS_FUNCTIONS[name] is not functions[name]:
        return f"the experts function {name} was registered by other code"
    return None


def _run(
    experts: Any,
    name: str,
    seam: ForwardPatch,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts' output [tokens, hidden]; its tensors are named as transformers' functions do.

    Args:
        experts: the module with the experts' weights.
        name: transformers' implementation.
        seam: calls the kernel.
        hidden_states: [tokens, hidden].
        top_k_index: the chosen experts, [tokens, top_k].
        top_k_weights: routing weights, [tokens, top_k].
    """
    rows, row_map = ROWS[name](experts, hidden_states, top_k_index)
    output = torch.empty_like(hidden_states)
    call = rows.unsqueeze(0), row_map, top_k_weights, output
    if not seam(*call):
        weigh_and_sum(*call)
    return output
