"""`gpt_oss.experts`: the scaled sum over a token's chosen experts, which ends the experts function.

transformers looks up experts functions by name in a registry (`ALL_EXPERTS_FUNCTIONS`) at each
call; `generate` switches from `grouped_mm` to `batched_mm` for decoding on a GPU. Both scale,
unsort and sum in separate operations. Here one call of `moe_reduce` does that: the rows keep their
order, and the map locates each token's rows. Other implementations (`eager`, `deepgemm`, ...) end
differently and run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from patcher.bench import VerificationError
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, GptOssPoint, NewForward
from patcher.integrate.transformers.parts import check_kinds, written_by_transformers
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
        _check_registry()
        return super().find()

    def install(self, kernel: Dispatcher) -> None:
        _check_registry()
        super().install(kernel)

    def parts(self, body: Any) -> list[torch.nn.Module]:
        from transformers.models.gpt_oss import modeling_gpt_oss as source

        experts = [layer.mlp.experts for layer in body.layers]
        kind: Any = source.GptOssExperts  # its decorator drops the type
        check_kinds(experts, kind)
        return experts

    def forwards(self, body: Any, seam: ForwardPatch) -> Iterator[NewForward]:
        for layer in body.layers:
            yield layer.mlp.experts, partial(_experts_forward, layer.mlp.experts, seam)

    @staticmethod
    def original(*args: Any) -> None:
        _weigh_and_sum(*args)


def _check_registry() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in _ROWS:
        if not written_by_transformers(ALL_EXPERTS_FUNCTIONS[name]):
            raise VerificationError(
                f"the experts function {name} was registered by other code",
                "remove the other patch first",
            )


def _experts_forward(experts: Any, seam: ForwardPatch, original: Forward) -> Forward:
    def forward(
        hidden_states: torch.Tensor, router_indices: Any = None, routing_weights: Any = None
    ) -> torch.Tensor:
        name = experts.config._experts_implementation
        refusal = f"experts implementation {name}" if name not in _ROWS else _refuse(experts)
        if refusal is not None:
            seam.refuse(refusal)
            result: torch.Tensor = original(hidden_states, router_indices, routing_weights)
            return result
        return _run(experts, name, hidden_states, router_indices, routing_weights, seam)

    return forward


def _refuse(experts: Any) -> str | None:
    if torch.is_grad_enabled():
        return "gradients are on"
    if hasattr(experts, "parametrizations"):
        return "experts' weights are parametrised"
    if len(experts.down_proj) != experts.config.num_local_experts:
        return "experts are spread over devices"
    return None


def _run(
    experts: Any,
    name: str,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    seam: ForwardPatch,
) -> torch.Tensor:
    """The experts' output [tokens, hidden].

    Args:
        experts: the module with the experts' weights.
        name: transformers' implementation.
        hidden: [tokens, hidden].
        chosen: indices of the chosen experts, [tokens, top_k].
        weights: routing weights, [tokens, top_k].
        seam: calls the kernel.
    """
    rows, row_map = _ROWS[name](experts, hidden, chosen)
    output = torch.empty_like(hidden)
    call = rows.unsqueeze(0), row_map, weights, output
    if not seam(*call):
        _weigh_and_sum(*call)
    return output


def _grouped_rows(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows sorted by expert [tokens * top_k, hidden], and their map, int32 [tokens, top_k]."""
    from transformers.integrations.moe import _grouped_linear

    ids, order = torch.sort(chosen.reshape(-1))
    # histc accepts only floats on a CPU, and only integers on a GPU in deterministic mode
    counted = ids.float() if hidden.device.type == "cpu" else ids.int()
    counts = torch.histc(counted, bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate_up = _grouped_linear(
        hidden[order // chosen.shape[-1]],
        experts.gate_up_proj,
        ends,
        bias=experts.gate_up_proj_bias[ids],
        is_transposed=True,
    )
    rows = _grouped_linear(
        experts._apply_gate(gate_up),
        experts.down_proj,
        ends,
        bias=experts.down_proj_bias[ids],
        is_transposed=True,
    )
    row_map = torch.empty_like(order, dtype=torch.int32)
    row_map[order] = torch.arange(len(order), device=order.device, dtype=torch.int32)
    return rows, row_map.view(chosen.shape)


def _batched_rows(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in token order, each computed with its own copy of the weights, and their map."""
    from transformers.integrations.moe import _batched_linear

    ids, top_k = chosen.reshape(-1), chosen.shape[-1]
    gate_up = _batched_linear(
        hidden.repeat_interleave(top_k, dim=0),
        experts.gate_up_proj[ids],
        bias=experts.gate_up_proj_bias[ids],
        is_transposed=True,
    )
    rows = _batched_linear(
        experts._apply_gate(gate_up),
        experts.down_proj[ids],
        bias=experts.down_proj_bias[ids],
        is_transposed=True,
    )
    row_map = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    return rows, row_map.view(chosen.shape)


_ROWS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "batched_mm": _batched_rows,
    "grouped_mm": _grouped_rows,
}
"""Functions that compute the experts' rows and their map, by transformers' implementation."""


def _weigh_and_sum(
    rows: torch.Tensor, row_map: torch.Tensor, scales: torch.Tensor, output: torch.Tensor
) -> None:
    """The end of both functions after the down projection: scale, unsort, sum."""
    chosen = rows[0][row_map.view(-1).long()].view(*row_map.shape, -1)
    output.copy_((chosen * scales.unsqueeze(-1)).sum(1))
