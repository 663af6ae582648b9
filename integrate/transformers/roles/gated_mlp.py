"""`gated_mlp`: the activation of every gated MLP of a model in one call each of `silu_and_mul`.

A module is taken for what it holds and computes: projections `gate_proj`, `up_proj` and
`down_proj`, an activation that is silu, and a forward whose source is that product alone. A probe
of numbers would miss one that clamps what is large. The three matmuls stay the model's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch
from patcher.integrate.transformers.mlp_classes import is_product
from patcher.integrate.transformers.onlookers import Onlookers
from patcher.integrate.transformers.parts import bare, kind_of
from patcher.integrate.transformers.probed import ProbedPoint
from patcher.integrate.transformers.swap import Forward

_PARTS = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = 0.02
"""Of the largest value of a probe: an activation may be rounded to bfloat16 before the product."""


class GatedMlps(ProbedPoint):
    """Replaces the `forward` of MLPs."""

    name: ClassVar[str] = "gated_mlp"
    op: ClassVar[str] = "silu_and_mul"
    role, others = "MLP", "layers"
    wanted: ClassVar[str] = "whose activation is silu(gate) * up"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a module has to compute: each is tried, so no other source matters."""
        return source_digest(_silu_and_mul)

    @staticmethod
    def original(*args: Any) -> None:
        _silu_and_mul(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return _holds(layer)

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return _computes(bare(part))

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        return _forward(part, seam, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: what the kernel is passed are activations."""
        return {}


def _forward(mlp: Any, seam: ForwardPatch, original: Forward) -> Forward:
    # a hook of the activation would miss its call; those of the projections see theirs
    onlookers = Onlookers(lambda: (tuple(_activation(mlp)), ()), *map(type, _activation(mlp)))
    probed = mlp.act_fn

    def forward(*args: torch.Tensor, **named: torch.Tensor) -> Any:
        [hidden_states] = *args, *named.values()
        if torch.is_grad_enabled():
            refusal: str | None = "gradients are on"
        elif mlp.act_fn is not probed and not _of_one_class(mlp.act_fn, probed):
            refusal = "the activation was replaced"
        else:
            refusal = onlookers.refusal()
        if refusal is not None:
            seam.refuse(refusal)
            return original(hidden_states)
        gate, up = mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)
        if gate.is_contiguous() and up.is_contiguous():
            output = torch.empty_like(gate)
            if seam(*(each.view(-1, gate.shape[-1]) for each in (gate, up, output))):
                return mlp.down_proj(output)
        else:
            seam.refuse("not contiguous")
        inner = mlp.act_fn(gate) * up
        seam.left(inner)
        return mlp.down_proj(inner)

    return forward


def _silu_and_mul(gate: torch.Tensor, up: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.silu(gate.float()) * up.float())


def _activation(mlp: Any) -> list[torch.nn.Module]:
    return [mlp.act_fn] if isinstance(mlp.act_fn, torch.nn.Module) else []


def _of_one_class(one: Any, other: Any) -> bool:
    return isinstance(one, torch.nn.Module) and kind_of(one) is kind_of(other)


def without_state(activation: Any) -> bool:
    """Whether an activation will compute what it does now: it has nothing that can be set."""
    if not isinstance(activation, torch.nn.Module):
        return isinstance(activation, FunctionType | BuiltinFunctionType)
    held = (activation._parameters, activation._buffers, activation._modules)
    own = {name for name in vars(activation) if not name.startswith("_")}
    return not any(held) and own <= {"training", "inplace"}


def _holds(module: torch.nn.Module) -> bool:
    """Whether a module holds what a gated MLP holds, and is called as one."""
    held = dict(module.named_children())
    return (
        all(name in held for name in _PARTS)
        and callable(getattr(module, "act_fn", None))
        and not set(held) - {*_PARTS, "act_fn"}
        and len(inspect.signature(module.forward).parameters) == 1
    )


def _is_product(mlp: torch.nn.Module) -> bool:
    try:
        source = inspect.getsource(kind_of(mlp).forward)
    except (OSError, TypeError):  # it was made at run time
        return False
    return is_product(source)


@torch.no_grad()
def _computes(mlp: Any) -> bool:
    """Whether an MLP computes what the op does between its own projections: by its source, and on
    numbers."""
    if not (_is_product(mlp) and without_state(mlp.act_fn)):
        return False
    weight = getattr(mlp.gate_proj, "weight", None)
    size = getattr(mlp.gate_proj, "in_features", None)
    if weight is None or size is None or weight.is_meta or not weight.is_floating_point():
        return False
    grid = torch.linspace(-8.0, 8.0, 65, device=weight.device)
    if not torch.allclose(mlp.act_fn(grid), torch.nn.functional.silu(grid), atol=1e-5):
        return False
    row = torch.linspace(-1.0, 2.0, size, device=weight.device, dtype=weight.dtype)
    rows = torch.stack([row, row.flip(0)])
    gate, up = mlp.gate_proj(rows), mlp.up_proj(rows)
    inner = torch.empty_like(gate)
    _silu_and_mul(gate, up, inner)
    expected, got = mlp.down_proj(inner), mlp(rows)
    return (
        isinstance(got, torch.Tensor)
        and got.shape == expected.shape
        and torch.allclose(got, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))
    )
