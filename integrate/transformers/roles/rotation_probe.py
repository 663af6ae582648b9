"""What an attention rotates, and how: tried with its own weights, its model's own angles and a few
numbers.

The attention runs alone, once as it is and once with another rotation, which notes what it is given
and compares its own result. So the function may have any text: what counts is that it turns halves
of a head, or of a head's first part, by cosines and sines that do not depend on the head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from patcher.integrate.transformers.copied_forward import with_function
from patcher.integrate.transformers.parts import (
    UNTRIED,
    bare,
    kind_of,
    sentence_of,
    some_numbers,
)

POSITIONS = (1, 5, 30)
"""Of the tokens of a probe."""
_TOLERANCE = 0.02
"""Of the largest value of a probe: products may be rounded to bfloat16 before they are added."""
_ARGUMENTS = ["q", "k", "cos", "sin"]


@dataclass(frozen=True)
class HeadRotation:
    """How the rotation of an attention is called."""

    axis: int
    """Where the cosines get the axis of the heads: 1, [batch, heads, tokens, size]; or 2."""
    size: int
    """Elements of a head that are turned, from the first."""
    angles: int
    """Of the last axis of the cosines: `size`, the first half twice, or half of it."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of query and cosines."""

    name: str = ""
    """By which the attention calls it."""
    paired: bool = False
    """Whether what is turned together lies side by side in a head before, and half a head apart
    only afterwards."""

    def unlike(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> str | None:
        """Why a call is of another kind than the one that was tried; None if it is not."""
        if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
            return "query, key or cosines of other axes"
        if cos.shape[-1] != self.angles or q.shape[-1] < self.size or k.shape[-1] < self.size:
            return "heads of another size"
        dtypes = (q.dtype, cos.dtype) == self.dtypes and k.dtype == q.dtype
        return None if dtypes else "query, key or cosines in another dtype"


def rotations_of(kind: type[Any]) -> tuple[str, ...]:
    """The names by which the forward of a class calls functions that may be rotations."""
    return _rotations_in(inspect.unwrap(kind.forward))


@cache
def _rotations_in(forward: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(forward, "__code__", None)
    names: dict[str, Any] = getattr(forward, "__globals__", {})
    called = {name: names.get(name) for name in (code.co_names if code else ())}
    return tuple(name for name, each in called.items() if inspect.isfunction(each) and _takes(each))


def _takes(function: Callable[..., Any]) -> bool:
    names = list(inspect.signature(function).parameters)
    return names[:4] == _ARGUMENTS and set(names[4:]) <= {"position_ids", "unsqueeze_dim"}


def further_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """What a rotation takes after the first four, with the values by default."""
    parameters = list(inspect.signature(function).parameters.values())[4:]
    return {each.name: each.default for each in parameters}


def axis_of(further: dict[str, Any], rest: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What a call of a rotation says of the axis of the heads; None if it never says it."""
    if rest:
        named = {**dict(zip(further, rest, strict=False)), **named}
    return named.get("unsqueeze_dim", further.get("unsqueeze_dim"))


@torch.no_grad()
def turn_of(attention: Any, rotaries: Iterable[Any]) -> HeadRotation | str:
    """How the rotation of an attention is called, or why it is not what the op does.

    Args:
        attention: the module, with its own weights; it may be on the device `meta`.
        rotaries: the modules of its model that give cosines and sines.
    """
    kind, seen = kind_of(attention), list[HeadRotation | str]()
    given = _inputs(attention, rotaries)
    if isinstance(given, str):
        return given

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def rotation(q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
            axis = axis_of(further_arguments(original), rest, named)
            seen.append(_turn(name, partial(original, **named), (q, k, cos, sin, *rest), axis))
            return original(q, k, cos, sin, *rest, **named)

        return rotation

    def in_place(q: Any, k: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> Any:
        turn = seen[0]
        assert isinstance(turn, HeadRotation), "only what is one is tried again"
        query, key = (rows(each, turn, copied=False) for each in (q, k))
        rotate(query.flatten(0, 1), key.flatten(0, 1), joined(turn, cos, sin, len(query)))
        return whole(query, q, turn), whole(key, k, turn)

    try:
        forward = kind.forward
        for name in rotations_of(kind):
            forward = with_function(forward, name, partial(noted, name))
        tried = bare(attention)
        expected = forward(tried, **given)
        if len(seen) != 1:
            return "it rotates more than once" if seen else "its layer has no rotation"
        if isinstance(found := seen[0], str) or next(attention.parameters()).is_meta:
            return found
        got = with_function(kind.forward, found.name, lambda _: in_place)(tried, **given)
    except (RuntimeError, *UNTRIED) as error:
        return f"it cannot be tried alone: {sentence_of(error)}"
    return found if _close(_first(got), _first(expected)) else "it reads what it rotates again"


def _first(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found.float()


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = _TOLERANCE * float(expected.abs().max())
    return torch.allclose(got, expected, rtol=0, atol=limit)


def _inputs(attention: Any, rotaries: Iterable[Any]) -> dict[str, Any] | str:
    """What to call an attention with, [1, tokens, hidden] and angles; or why that is not known."""
    config, weight = getattr(attention, "config", None), next(attention.parameters(), None)
    size = getattr(config, "hidden_size", None)
    names = inspect.signature(kind_of(attention).forward).parameters
    if weight is None or not isinstance(size, int) or "position_embeddings" not in names:
        return "it cannot be tried alone: what it is called with is not known"
    own = [each for each in rotaries if getattr(each, "config", None) is config]
    if not own:
        return "its model has no angles for it"
    hidden = some_numbers(1, len(POSITIONS), size).to(weight.device, weight.dtype)
    positions = torch.tensor([POSITIONS], device=weight.device)
    more = [_layer_type(attention)] if "layer_type" in _parameters(own[0]) else []
    try:
        angles = own[0](hidden, positions, *more)
    except (RuntimeError, *UNTRIED) as error:
        return f"its angles cannot be computed alone: {sentence_of(error)}"
    given = {"position_embeddings": angles, "position_ids": positions, "attention_mask": None}
    first = next(name for name in names if name != "self")
    return {first: hidden, **{key: value for key, value in given.items() if key in names}}


def _parameters(rotary: Any) -> Iterable[str]:
    return inspect.signature(rotary.forward).parameters


def _layer_type(attention: Any) -> Any:
    types = getattr(attention.config, "layer_types", None)
    index = getattr(attention, "layer_idx", None)
    return None if types is None or index is None else types[index]


def _turn(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], axis: Any
) -> HeadRotation | str:
    """How one call of a rotation turns, tried on other numbers of the same shapes."""
    q, k, cos, sin, *rest = args
    if axis not in (None, 1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return "query, key or cosines of other axes"
    if q.is_meta:  # a model without weights
        q, k = (some_numbers(at, *x.shape)[at - 1].to(x.dtype) for at, x in ((1, q), (2, k)))
        cos, sin = _some_angles(cos)
    turned, most = original(q, k, cos, sin, *rest), min(q.shape[-1], k.shape[-1])
    sizes, axes = (cos.shape[-1], 2 * cos.shape[-1]), (1, 2) if axis is None else (axis,)
    for size, at, paired in itertools.product(sizes, axes, (False, True)):
        tokens = q.shape[3 - at]
        if size > most or size % 2 or tokens != cos.shape[1]:
            continue
        turn = HeadRotation(at, size, cos.shape[-1], (q.dtype, cos.dtype), name, paired)
        table = joined(turn, cos, sin, 1)
        pairs = zip((q, k), turned, strict=True)
        if all(_alike(turn, heads, got, table) for heads, got in pairs):
            return turn
    return "it turns other pairs than a head's halves"


def _some_angles(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a size as transformers makes them, which has no values: halves twice."""
    size = like.shape[-1]
    positions, order = torch.tensor(POSITIONS, device="cpu"), torch.arange(size, device="cpu")
    half = positions.view(1, -1, 1) / (1 + order[: (size + 1) // 2])
    angles = torch.cat((half, half), -1)[..., :size]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def joined(turn: HeadRotation, cos: torch.Tensor, sin: torch.Tensor, batch: int) -> torch.Tensor:
    """The op's table [batch * tokens, size]: cosines, then sines, of each token."""
    half = turn.size // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), -1)
    return table.expand(batch, -1, -1).flatten(0, 1).contiguous()


def _alike(turn: HeadRotation, heads: torch.Tensor, got: torch.Tensor, table: torch.Tensor) -> bool:
    wide = rows(heads.float(), turn, copied=True)
    only = wide.flatten(0, 1)
    rotate(only, only[:, :0], table.float())
    expected = whole(wide, heads.float(), turn)
    return got.dtype == heads.dtype and _close(got.float(), expected)


def rows(heads: torch.Tensor, turn: HeadRotation, *, copied: bool) -> torch.Tensor:
    """What is turned, [batch, tokens, heads, size] and dense: the heads themselves, or a copy."""
    found = (heads.transpose(1, 2) if turn.axis == 1 else heads)[..., : turn.size]
    if turn.paired:
        return torch.cat((found[..., 0::2], found[..., 1::2]), -1)
    dense = found.is_contiguous() and not copied
    return found if dense else found.clone(memory_format=torch.contiguous_format)


def whole(found: torch.Tensor, heads: torch.Tensor, turn: HeadRotation) -> torch.Tensor:
    """Heads in the order of the original, whose first part is turned."""
    turned = found.transpose(1, 2) if turn.axis == 1 else found
    rest = heads[..., turn.size :]
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rotate(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    for heads in (query, key):
        first, second = heads.chunk(2, -1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
