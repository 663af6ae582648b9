"""`router`: the top k of a router's logits and the softmax over them in one call of `moe_topk`.

A module is taken for what it holds and computes: a weight [experts, hidden], a number `top_k`, and
a forward that gives logits, scores and experts. It runs nothing but a matmul, a softmax, a top k
and a division by a sum, and on numbers its scores are the softmax over the chosen logits. So those
that choose by sigmoids, biases or groups, or do not normalise, stay. The matmul stays the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from patcher.integrate.points import source_digest
from patcher.integrate.transformers.forwards import ForwardPatch, why_not_now
from patcher.integrate.transformers.operators import further_operators
from patcher.integrate.transformers.parts import (
    UNTRIED,
    kind_of,
    sentence_of,
    some_numbers,
)
from patcher.integrate.transformers.probed import ProbedPoint
from patcher.integrate.transformers.swap import Forward

_OPERATORS = ("mm", "addmm", "linear", "softmax", "topk", "sum", "div")
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
_ROUGH = 0.02
"""Of a score of a probe, by its dtype: others may be rounded twice."""
_ROWS, _SPREAD = 5, 0.5
"""Of a probe: its rows, and the spread of its logits. With a large spread the chosen logits have
almost all of a softmax, so that scores would look as if they were divided by their sum."""


@dataclass(frozen=True)
class Recipe:
    """How a router gets from its input to what it returns."""

    wide: bool
    """Whether input and weight are float32 in the matmul."""
    logits: torch.dtype
    scores: torch.dtype
    flattens: bool
    """Whether an input of three axes is taken as rows."""
    given: torch.dtype
    """Of input and weight when it was tried: with others, logits and scores have others, too."""
    settings: Mapping[str, object]
    """The module's own fields when it was tried."""


class Routers(ProbedPoint):
    """Replaces the `forward` of routers."""

    name: ClassVar[str] = "router"
    op: ClassVar[str] = "moe_topk"
    role, others = "router", "layers"
    wanted: ClassVar[str] = "whose scores are the softmax over the chosen logits"

    @classmethod
    def fingerprint(cls) -> str:
        """sha256 of what a module has to compute: each is tried, so no other source matters."""
        return source_digest(_top_k)

    @staticmethod
    def original(*args: Any) -> None:
        _top_k(*args)

    def of_role(self, layer: Any) -> bool:
        """See `LayerPoint`."""
        return _holds(layer)

    def computes(self, part: Any) -> bool:
        """See `ProbedPoint`."""
        return isinstance(recipe_of(part), Recipe)

    def applies(self, layer: Any) -> str | None:
        """See `LayerPoint`."""
        found = recipe_of(layer)
        return found if isinstance(found, str) else None

    def new_forward(self, part: Any, seam: ForwardPatch, original: Forward) -> Forward:
        """See `ProbedPoint`."""
        recipe = recipe_of(part)
        assert isinstance(recipe, Recipe), "a part that is patched was tried"
        return _forward(part, recipe, seam, original)

    def constants(self, layer: Any) -> Mapping[str, torch.Tensor]:
        """See `LayerPoint`: what the kernel is passed are activations."""
        return {}


def _forward(router: Any, recipe: Recipe, seam: ForwardPatch, original: Forward) -> Forward:
    own = recipe.scores in (recipe.logits, torch.float32)
    kind, settings = recipe.scores if own else torch.float32, tuple(recipe.settings.items())

    def forward(*args: torch.Tensor, **named: torch.Tensor) -> Any:
        [hidden_states] = *args, *named.values()
        refusal = why_not_now(hidden_states)
        if refusal is None and any(getattr(router, name) != was for name, was in settings):
            refusal = "its settings were changed"
        if refusal is None and not (recipe.flattens or hidden_states.dim() == 2):
            refusal = "its input is no rows"
        if refusal is None and {hidden_states.dtype, router.weight.dtype} != {recipe.given}:
            refusal = "input or weight in another dtype"
        if refusal is not None:
            seam.refuse(refusal)
            return original(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = _logits(router, rows, recipe.wide).to(recipe.logits)
        scores = logits.new_empty(len(logits), router.top_k, dtype=kind)
        experts = torch.empty_like(scores, dtype=torch.int64)
        if not seam(logits, scores, experts):
            return original(hidden_states)
        return logits, scores.to(recipe.scores), experts

    return forward


def _logits(router: Any, rows: torch.Tensor, wide: bool) -> torch.Tensor:
    weight, bias = router.weight, getattr(router, "bias", None)
    if wide:
        rows, weight = rows.float(), weight.float()
        bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(rows, weight, bias)


def _top_k(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    values, chosen = torch.topk(logits, scores.shape[1], dim=-1)
    scores.copy_(torch.softmax(values.float(), dim=-1))
    experts.copy_(chosen)


def _holds(module: torch.nn.Module) -> bool:
    """Whether a module holds what a router holds, and is called as one."""
    held = module._parameters
    weight, top_k = held.get("weight"), getattr(module, "top_k", None)
    if weight is None or weight.dim() != 2 or type(top_k) is not int or module._modules:
        return False
    if held.keys() - {"weight", "bias"} or not 0 < top_k <= len(weight):
        return False
    return len(inspect.signature(module.forward).parameters) == 1


def settings_of(router: Any) -> dict[str, object]:
    return {
        name: value
        for name, value in router.__dict__.items()
        if isinstance(value, bool | int | float | str)
    }


@torch.no_grad()
def recipe_of(router: Any) -> Recipe | str:
    """How a router computes what the op does, tried with its own weight; or why it does not."""
    weight, forward = router.weight, kind_of(router).forward
    if weight.is_meta:
        return "its weight is not in memory"
    if not weight.is_floating_point():
        return "its weight is quantised"
    rows = some_numbers(_ROWS, weight.shape[1]).to(weight.device)
    spread = float((rows @ weight.float().T).std())
    rows = (rows * (_SPREAD / spread if spread else 1.0)).to(weight.dtype)
    try:
        got, others = further_operators(forward, router, rows, known=_OPERATORS)
    except UNTRIED as error:  # some take three axes alone
        return f"it cannot be tried alone: {sentence_of(error)}"
    if others:
        return f"it also computes {others[0]}"
    shapes = [(_ROWS, len(weight)), (_ROWS, router.top_k), (_ROWS, router.top_k)]
    if not (isinstance(got, tuple) and [getattr(each, "shape", None) for each in got] == shapes):
        return "it returns something else than logits, scores and experts"
    logits, scores, experts = got
    wide = next((w for w in (False, True) if _gives(router, rows, w, logits)), None)
    if wide is None or experts.dtype != torch.int64:
        return "its logits are no matmul with its weight"
    if not _are_softmax(logits.float(), scores, experts):
        return "its scores are not the softmax over the chosen logits"
    flattens, settings = _flattens(router, rows), settings_of(router)
    return Recipe(wide, logits.dtype, scores.dtype, flattens, weight.dtype, settings)


def _gives(router: Any, rows: torch.Tensor, wide: bool, logits: torch.Tensor) -> bool:
    ours = _logits(router, rows, wide).to(logits.dtype)
    same: bool = ours.equal(logits)
    return same


def _are_softmax(logits: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> bool:
    """Whether experts have the largest logits, in whatever order, and scores are by these."""
    chosen, most = logits.gather(1, experts), logits.topk(experts.shape[1]).values
    limit = _TOLERANCES.get(scores.dtype, _ROUGH)
    distinct = experts.sort(1).values.diff(dim=1).ne(0).all()
    return bool(
        distinct
        and torch.allclose(chosen.sort(1, descending=True).values, most, rtol=1e-5, atol=1e-6)
        and torch.allclose(scores.float(), torch.softmax(chosen, 1), rtol=limit, atol=1e-6)
    )


def _flattens(router: Any, rows: torch.Tensor) -> bool:
    try:
        logits, *_ = kind_of(router).forward(router, rows.unsqueeze(0))
    except (RuntimeError, *UNTRIED):  # it takes rows alone
        return False
    return bool(logits.dim() == 2)
