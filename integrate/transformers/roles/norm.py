"""`norm` and `gemma_norm`: every RMSNorm of a model in one call each of `rms_norm`, or of
`gemma_rms_norm` where it multiplies by one more than its weight; whatever its class.

A module is taken for what it holds and computes: one weight, a number that is added to the mean
square, one argument, and on numbers the same as the op. So each norm is of one point at most, and
those that multiply by a gate are left as they are.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch
from patcher.integrate.transformers.probed import ProbedPoint
from patcher.integrate.transformers.swap import Forward

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Of a norm: rows, weight, output, epsilon."""
_SIZE = 64
"""Elements of a norm that is built to see what its class computes."""
_TOLERANCE = 0.02
"""Of a value of a probe, relative: norms may round to bfloat16 twice."""


class RmsNorms(ProbedPoint):
    """Replaces the `forward` of norms."""

    name: ClassVar[str] = "norm"
    op: ClassVar[str] = "rms_norm"
    role, others = "norm", "norms"
    wanted: ClassVar[str] = "that multiplies by its weight alone"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a module has to compute: each is tried, so no other source matters."""
        return source_digest(_rms_norm)

    @staticmethod
    def original(*args: Any) -> None:
        _rms_norm(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return holds_norm(layer)

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return computes_norm(part, FORMULAS[self.op])

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        return _forward(part, seam, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`."""
        return {"weight": layer.weight}


class GemmaRmsNorms(RmsNorms):
    """The same for norms whose weight is kept as an offset from one."""

    name: ClassVar[str] = "gemma_norm"
    op: ClassVar[str] = "gemma_rms_norm"
    wanted: ClassVar[str] = "that multiplies by one more than its weight"

    @classmethod
    def fingerprint(cls) -> str:
        """See `RmsNorms.fingerprint`."""
        return source_digest(_gemma_rms_norm)

    @staticmethod
    def original(*args: Any) -> None:
        _gemma_rms_norm(*args)


FORMULAS: Mapping[str, Formula] = {each.op: each.original for each in (RmsNorms, GemmaRmsNorms)}
"""What norms compute, by the op's name."""


def _forward(norm: Any, seam: ForwardPatch, original: Forward) -> Forward:
    def forward(*args: torch.Tensor, **named: torch.Tensor) -> Any:
        [hidden_states] = *args, *named.values()
        weight, epsilon = norm.weight, epsilon_of(norm)
        rows = None if torch.is_grad_enabled() else _rows(hidden_states)
        if rows is None:
            seam.refuse("gradients are on" if torch.is_grad_enabled() else "not contiguous")
        elif weight.dtype != hidden_states.dtype:
            # some norms return their weight's dtype then, others that of what they were given
            seam.refuse("weight in another dtype")
        elif epsilon is None:
            seam.refuse("its epsilon is no number")
        else:
            output = hidden_states.new_empty(hidden_states.shape)
            if seam(rows, weight, output.view(rows.shape), epsilon):
                return output
            del output
            result = original(hidden_states)
            seam.left(result)
            return result
        return original(hidden_states)

    return forward


def _rows(hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The tensor as rows [rows, hidden] at one pitch; None where only a copy would be."""
    if hidden_states.is_contiguous():
        return hidden_states.view(-1, hidden_states.shape[-1])
    if torch.compiler.is_compiling():  # a view that fails would end the graph
        return None
    try:
        return hidden_states.view(-1, hidden_states.shape[-1])
    except RuntimeError:
        return None


def _rms_norm(
    input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_(weight.float() * (wide * scale))


def _gemma_rms_norm(
    input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, epsilon: float
) -> None:
    wide = input.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    output.copy_((1.0 + weight.float()) * (wide * scale))


def epsilon_of(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(found) if isinstance(found, float | int) else None


def holds_norm(module: torch.nn.Module) -> bool:
    """Whether a module holds what a norm holds, and is called as one."""
    held = dict(module.named_parameters())
    weight = held.get("weight")
    if len(held) != 1 or weight is None or weight.dim() != 1 or epsilon_of(module) is None:
        return False
    # one that also takes a gate is another role, even where the gate may be left out
    return len(inspect.signature(module.forward).parameters) == 1


@torch.no_grad()
def computes_norm(norm: Any, formula: Formula) -> bool:
    """Whether a norm computes on numbers what the formula says, with its own weight."""
    weight, size = norm.weight, norm.weight.numel()
    if weight.is_meta:
        return False
    row = torch.linspace(-1.0, 2.0, size, device=weight.device, dtype=weight.dtype)
    rows = torch.stack([row, 30 * row.flip(0)])
    expected = torch.empty_like(rows)
    formula(rows, weight, expected, epsilon_of(norm) or 0.0)
    got = norm(rows)
    return (
        isinstance(got, torch.Tensor)
        and got.dtype == rows.dtype
        and got.shape == rows.shape
        and torch.allclose(got.float(), expected.float(), rtol=_TOLERANCE, atol=1e-6)
    )


def class_computes(module: str, name: str) -> str | None:
    """The op that an object of a class of norms, built with a size alone, computes; None: neither.

    Args:
        module: the module of the class, which is imported.
        name: the name of the class.
    """
    kind = getattr(importlib.import_module(module), name)
    try:
        norm = kind(_SIZE)
    except (TypeError, AttributeError):  # it is built from something else
        return None
    if not holds_norm(norm):
        return None
    torch.nn.init.constant_(norm.weight, 3.0)
    return next((op for op, formula in FORMULAS.items() if computes_norm(norm, formula)), None)
