"""What transformers' experts functions `grouped_mm` and `batched_mm` compute until they weigh and
sum: a row for each token and expert that it chose, and where each token's rows are.

Both functions scale, unsort and sum in separate operations. Here the rows keep their order, and a
map locates each token's, so that one call of `moe_reduce` does all of that. A choice beyond the
experts of this rank has no row: -1 in the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patcher.bench import VerificationError
from patcher.integrate.transformers.forwards import ForwardPatch
from patcher.integrate.transformers.parts import written_by_transformers
from patcher.integrate.transformers.swap import Forward


def check_registry() -> None:
    """Check that both functions are transformers' own.

    Raises:
        VerificationError: other code has put one in the place of them.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in ROWS:
        if not written_by_transformers(ALL_EXPERTS_FUNCTIONS[name]):
            raise VerificationError(
                f"the experts function {name} was registered by other code",
                "remove the other patch first",
            )


def own_functions() -> dict[str, Callable[..., torch.Tensor]]:
    """transformers' own functions by name."""
    from transformers.integrations import moe

    return {
        "batched_mm": moe.batched_mm_experts_forward,
        "grouped_mm": moe.grouped_mm_experts_forward,
    }


def unlike_its_own(name: str, functions: dict[str, Callable[..., torch.Tensor]]) -> str | None:
    """Why the implementation of that name is not one of transformers' own functions."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if name not in functions:
        return f"experts implementation {name}"
    if ALL_EXPERTS_FUNCTIONS[name] is not functions[name]:
        return f"the experts function {name} was registered by other code"
    return None


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
    places = torch.arange(len(order), device=order.device, dtype=torch.int32)
    if _of_a_rank(experts):  # those of other ranks are last, and no matmul writes their rows
        places = places.masked_fill(ids >= experts.num_experts, -1)
        ids = ids.clamp(max=experts.num_experts - 1)
    rows = _grouped_linear(
        hidden[order // chosen.shape[-1]],
        _first(experts),
        ends,
        bias=_bias(experts, _first_name(experts), ids),
        is_transposed=experts.is_transposed,
    )
    rows = _grouped_linear(
        _activated(experts, rows),
        experts.down_proj,
        ends,
        bias=_bias(experts, "down_proj", ids),
        is_transposed=experts.is_transposed,
    )
    row_map = torch.empty_like(places)
    row_map[order] = places
    return _finished(experts, rows), row_map.view(chosen.shape)


def _batched_rows(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in token order, each computed with its own copy of the weights, and their map."""
    from transformers.integrations.moe import _batched_linear

    ids, top_k = chosen.reshape(-1), chosen.shape[-1]
    places = torch.arange(len(ids), device=ids.device, dtype=torch.int32)
    if _of_a_rank(experts):
        places = places.masked_fill(ids >= experts.num_experts, -1)
        ids = ids.clamp(0, experts.num_experts - 1)
    rows = _batched_linear(
        hidden.repeat_interleave(top_k, dim=0),
        _first(experts)[ids],
        bias=_bias(experts, _first_name(experts), ids),
        is_transposed=experts.is_transposed,
    )
    rows = _batched_linear(
        _activated(experts, rows),
        experts.down_proj[ids],
        bias=_bias(experts, "down_proj", ids),
        is_transposed=experts.is_transposed,
    )
    return _finished(experts, rows), places.view(chosen.shape)


ROWS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "batched_mm": _batched_rows,
    "grouped_mm": _grouped_rows,
}
"""Functions that compute the experts' rows and their map, by transformers' implementation."""


def weigh_and_sum(
    rows: torch.Tensor, row_map: torch.Tensor, scales: torch.Tensor, output: torch.Tensor
) -> None:
    """The end of both functions after the down projection: scale, unsort, sum."""
    chosen = rows[0][row_map.long()]
    weighed = (chosen * scales.unsqueeze(-1)).masked_fill((row_map < 0).unsqueeze(-1), 0.0)
    output.copy_(weighed.sum(1))


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


def _of_a_rank(experts: Any) -> bool:
    """Whether choices may be beyond the experts; 5.17 takes each module for one of a rank."""
    return bool(getattr(experts, "_is_expert_parallel", True))


def _first_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _first(experts: Any) -> torch.Tensor:
    weight: torch.Tensor = getattr(experts, _first_name(experts))
    return weight


def _bias(experts: Any, name: str, ids: torch.Tensor) -> torch.Tensor | None:
    return getattr(experts, f"{name}_bias")[ids] if experts.has_bias else None


def _activated(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    return found


def _finished(experts: Any, rows: torch.Tensor) -> torch.Tensor:
    """The rows before they are weighed; versions before a norm of them have no such field."""
    normed = getattr(experts, "has_post_expert_norm", False)
    found: torch.Tensor = experts.post_expert_norm(rows) if normed else rows
    return found
