"""`experts`: an experts module without quantised weights in one call of `moe_experts`, for the few
rows that a step of decode has. The guards leave more rows to transformers' own functions.

A module is taken if transformers' registry of experts functions runs it, if it holds gate and up
[experts, 2 * inner, hidden] and down [experts, hidden, inner] without biases, if what is between
the two runs no operator but those of silu(gate) * up, and if all of it gives on numbers, with the
module's own weights, what the op computes. So clamps, other factors (gpt-oss) and norms stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, why_not_now
from patcher.integrate.transformers.onlookers import Onlookers
from patcher.integrate.transformers.operators import further_operators
from patcher.integrate.transformers.parts import UNTRIED, bare, kind_of, sentence_of
from patcher.integrate.transformers.probed import ELSE
from patcher.integrate.transformers.roles.experts_modules import (
    alike,
    changed,
    not_in_memory,
    of_another_class,
    some_calls,
)
from patcher.integrate.transformers.roles.experts_point import ExpertsPoint
from patcher.integrate.transformers.roles.experts_rows import own_functions, unlike_its_own
from patcher.integrate.transformers.roles.gated_mlp import without_state
from patcher.integrate.transformers.roles.topk_router import settings_of
from patcher.integrate.transformers.swap import Forward

_OPERATORS = ("silu", "sigmoid", "mul", "split", "chunk")
_ACTIVATION = "act_fn"
"""Where most classes have it; others call a function of PyTorch."""
_GRID = 65
"""Numbers of a probe of the activation."""


class ExpertsWhole(ExpertsPoint):
    """Replaces the `forward` of experts modules."""

    name: ClassVar[str] = "experts"
    op: ClassVar[str] = "moe_experts"
    wanted: ClassVar[str] = "of silu(gate) * up without biases"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a module has to compute, and of the functions that are not called."""
        return source_digest(*own_functions().values(), _experts)

    @staticmethod
    def original(*args: Any) -> None:
        _experts(*args)

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        return _by_what_it_holds(layer) or not_in_memory(layer) or _tried(bare(layer))

    def would_take(self, layer: Any) -> bool:
        """See `ProbedPoint`: no weight decides."""
        return _by_what_it_holds(layer) is None

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        return _forward(part, seam, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: only such weights are passed that the point takes."""
        if _by_what_it_holds(layer) is not None:
            return {}
        return {"gate_up": layer.gate_up_proj, "down": layer.down_proj}


def _forward(experts: Any, seam: ForwardPatch, original: Forward) -> Forward:
    functions = own_functions()
    known = {**settings_of(experts), _ACTIVATION: _now(experts, _ACTIVATION)}
    settings, gate = tuple(known.items()), _Gate(experts)
    # the activation is no longer called
    onlookers = Onlookers(lambda: (_modules(experts), ()), *map(type, _modules(experts)))

    def forward(*args: Any, **more: Any) -> Any:
        hidden = args[0] if args else more["hidden_states"]
        refusal = (
            why_not_now(hidden)
            or _of_another_function(experts, functions)
            or changed(experts)
            or next((_told(name) for name, was in settings if _now(experts, name) != was), None)
            or (_told(_ACTIVATION) if _is_another(gate) else None)
            or onlookers.refusal()
        )
        if refusal is not None:
            seam.refuse(refusal)
        elif not hidden.is_contiguous():
            seam.refuse("not contiguous")
        else:
            output = torch.empty_like(hidden)
            if seam(*_arguments(experts, *args, **more), output):
                return output
        return original(*args, **more)

    return forward


def _now(experts: Any, name: str) -> Any:
    return getattr(experts, name, None)


def _told(name: str) -> str:
    return "the activation was replaced" if name == _ACTIVATION else "its settings were changed"


class _Gate:
    """What a module computes between its matmuls: the function, of its class or its own."""

    def __init__(self, experts: Any) -> None:
        self.experts, self.function = experts, experts._apply_gate


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_another(gate: _Gate) -> bool:
    """Whether other code has put another function in the place of a module's."""
    return bool(gate.experts._apply_gate != gate.function)


def _arguments(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What the kernel is given; the names are those of transformers' functions."""
    weights = experts.gate_up_proj, experts.down_proj
    return hidden_states, *weights, top_k_weights.contiguous(), top_k_index.contiguous()


def _of_another_function(
    experts: Any, functions: dict[str, Callable[..., torch.Tensor]]
) -> str | None:
    """Why the chosen implementation is none whose result is known: `eager` is the class's own."""
    name = experts.config._experts_implementation
    return None if name == "eager" else unlike_its_own(name, functions)


def _modules(experts: Any) -> tuple[torch.nn.Module, ...]:
    return tuple(experts.children())


def _experts(*args: torch.Tensor) -> None:
    """The op's arithmetic, an expert at a time, rounded where transformers rounds."""
    hidden, gate_up, down, gains, chosen, output = args
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(len(down)):
        rows, choice = torch.where(chosen == expert)
        gate, up = torch.nn.functional.linear(hidden[rows], gate_up[expert]).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        found = torch.nn.functional.linear(inner, down[expert]) * gains[rows, choice, None]
        total.index_add_(0, rows, found.float())
    output.copy_(total)


def _by_what_it_holds(experts: Any) -> str | None:
    """Why a module computes something else, by its class, its fields and its activation."""
    if (reason := of_another_class(experts)) is not None:
        return reason
    if not experts.has_gate:
        return "it has no gate"
    if experts.has_bias:
        return "it has biases"
    if experts.is_transposed:
        return "its weights lie the other way"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm follows its matmuls"
    held = dict(experts.named_parameters())
    if held.keys() != {"gate_up_proj", "down_proj"} or dict(experts.named_buffers()):
        return "it holds more than two matrices"
    count, hidden, inner = experts.down_proj.shape
    if experts.gate_up_proj.shape != (count, 2 * inner, hidden):
        return "its two matrices do not fit together"
    if (reason := _of_another_activation(experts)) is not None:
        return reason
    stateless = without_state(getattr(experts, _ACTIVATION, torch.nn.functional.silu))
    return None if stateless else "its activation has a state"


@torch.no_grad()
def _of_another_activation(experts: Any) -> str | None:
    """What is between the two matmuls, tried on a grid of gates and ups; it has no weights."""
    line = torch.linspace(-8.0, 8.0, _GRID, device="cpu", dtype=torch.float32)
    gate, up = line.view(-1, 1).expand(_GRID, _GRID), line.expand(_GRID, _GRID)
    apply = bare(experts)._apply_gate
    try:
        got, others = further_operators(apply, torch.cat([gate, up], 1), known=_OPERATORS)
    except (RuntimeError, *UNTRIED) as error:
        return f"it cannot be tried alone: {sentence_of(error)}"
    if others:
        return f"between its matmuls it also computes {others[0]}"
    expected = torch.nn.functional.silu(gate) * up
    if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-4, atol=1e-4):
        return "between its matmuls is not silu(gate) * up"
    return None


@torch.no_grad()
def _tried(experts: Any) -> str | None:
    given = some_calls(experts)
    hidden, chosen, gains = given
    _experts(hidden, experts.gate_up_proj, experts.down_proj, gains, chosen, got := hidden.clone())
    functions = *own_functions().values(), kind_of(experts).forward.__wrapped__  # and `eager`
    try:
        if all(alike(got, each(experts, *given)) for each in functions):
            return None
    except UNTRIED as error:
        return f"it cannot be tried alone: {sentence_of(error)}"
    return ELSE
