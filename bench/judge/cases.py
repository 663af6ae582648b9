"""Test cases of a candidate: shapes, dtypes, regimes, strides and secret seeds."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patcher.bench.errors import UsageError
from patcher.bench.judge import op_calls, regimes
from patcher.bench.judge.accuracy import (
    FLUSHED,
    explain_mismatch,
    explain_touched,
    numbers,
    stacked,
)
from patcher.bench.judge.baseline_errors import carried_over
from patcher.bench.judge.blob import Layout, Travel, Wanted, layout
from patcher.bench.judge.call_recording import EngineCall
from patcher.bench.judge.drawing import drawn_points
from patcher.bench.judge.placement import SHIFT, placements, strides_of
from patcher.bench.ops.codes import nudge
from patcher.bench.ops.contract import Point, Sweep, TensorSpec
from patcher.bench.ops.dtypes import DTYPES, dtype_of
from patcher.bench.ops.op import Op

Values = dict[str, Tensor]
MIXED_BYTES = 16 << 20
"""Size in bytes above which a read-only tensor of arbitrary bits is not sent, and neither are
weights of normal values."""
RECORDED = "recorded"
"""The regime of what an engine was given."""
CHECKED_BYTES = 1 << 20
"""Size in bytes above which a digest of a read-only tensor is returned, and above which what is
only written is poisoned where the call runs."""


@dataclass(frozen=True)
class Case:
    """One seeded problem."""

    point: Point
    regime: str
    seed: int
    scalars: tuple[float, ...]
    placed: str = "plain"
    """`plain`, or one of `placements`: other strides, or `shifted` (misaligned)."""
    only: str = ""
    """The tensor that the regime applies to; empty: all that it may change."""
    changed: int | None = None
    """Seed that changes one element of each free tensor relative to the case without it."""
    recorded: EngineCall | None = None
    """The call of an engine that it repeats, with its values and strides."""

    def label(self) -> str:
        if self.recorded is not None:
            return self.recorded.label
        placed = "" if self.placed == "plain" else f" {self.placed}"
        only = f" {self.only}" if self.only else ""
        return f"{self.point.label()} {self.regime}{only}{placed}"


class Secrets:
    """Source of seeds: the system, or a given number that makes a verdict reproducible."""

    def __init__(self, seed: int | None = None) -> None:
        self.random: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)

    def seed(self) -> int:
        return self.random.getrandbits(62)

    def order(self, sets: int, least: int) -> list[int]:
        """The sets to call, in order; the others are decoys."""
        return self.random.sample(range(sets), self.random.randint(min(least, sets), sets))


def reseeded(case: Case, draw: Secrets) -> Case:
    return Case(case.point, case.regime, draw.seed(), case.scalars, case.placed)


def correctness_cases(op: Op, sweep: Sweep, draw: Secrets, rounds: int = 1) -> list[Case]:
    """Every swept point, every regime, the hidden shapes in every dtype of the contract, points
    drawn anew, and every placement that it allows, in random order. `rounds` repeats them.

    Scalars vary too: some cases use another epsilon than the sweep's.
    """
    served = op.served_scalars
    other = _scaled(op, 100)
    names = regimes.regimes_of(op)
    points = sweep.points()
    choices = op.contract.dtype_choices()
    cases: list[Case] = []

    def add(point: Point, regime: str, **more: Any) -> None:
        cases.append(Case(point, regime, draw.seed(), more.pop("scalars", served), **more))

    for turn in range(rounds):
        for point in points:
            add(point, "normal")
        for regime in names:
            add(draw.random.choice(points[len(points) // 2 :]), regime)
            for only in regimes.targets(op, regime):
                # a constant tensor can give all outputs of a row one sum, which may be small by
                # chance though its terms are not, so use many rows to know the size of sums
                few, many = points[: len(points) // 2 + 1], points[len(points) // 2 :]
                there = _holding(op, only, many if regime == "ones" else few, sweep)
                add(draw.random.choice(there), regime, only=only)
        add(points[len(points) // 2], "normal", scalars=other)
        for index, shape in enumerate(op.contract.hidden):
            add(Point(axes=shape.axes, dtypes=sweep.dtypes), "normal")
            dtypes = choices[(index + turn) % len(choices)]
            add(Point(axes=shape.axes, dtypes=dtypes), draw.random.choice(names))
        for index, point in enumerate(drawn_points(op.contract, sweep, draw.random)):
            regime = draw.random.choice(names) if index % 2 else "normal"
            add(point, regime, scalars=_drawn_scalars(op, draw) if index % 3 == 0 else served)
        for placed in placements(op):
            for point in (points[0], points[-1]):
                add(point, "normal", placed=placed)
    draw.random.shuffle(cases)
    return cases


def _drawn_scalars(op: Op, draw: Secrets) -> tuple[float, ...]:
    """Scalars from a tenth to a hundred times those of the sweep."""
    return _scaled(op, math.exp(draw.random.uniform(math.log(0.1), math.log(100))))


def _scaled(op: Op, factor: float) -> tuple[float, ...]:
    """The sweep's scalars times a factor; integers stay as they are."""
    served = op.served_scalars
    return tuple(each if isinstance(each, int) else each * factor for each in served)


def _holding(op: Op, name: str, points: Sequence[Point], sweep: Sweep) -> Sequence[Point]:
    """The points where a tensor has elements: those given, or else hidden shapes in the sweep's
    dtypes. An optional tensor may be empty in a whole sweep."""
    [tensor] = [each for each in op.contract.tensors if each.name == name]
    hidden = [Point(axes=shape.axes, dtypes=sweep.dtypes) for shape in op.contract.hidden]
    for some in (points, hidden):
        if there := [each for each in some if math.prod(op.contract.shape(tensor, each))]:
            return there
    return points


def shapes_tried(op: Op, sweep: Sweep) -> list[Point]:
    """The swept and hidden shapes, in the sweep's dtypes and each other pairing that the op takes:
    no tensor of a candidate's calls is larger than there."""
    hidden = (Point(axes=shape.axes, dtypes=sweep.dtypes) for shape in op.contract.hidden)
    shapes = [point.axes for point in (*sweep.points(), *hidden)]
    others = [each for each in op.contract.dtype_choices() if each != sweep.dtypes]
    pairings = [sweep.dtypes, *others]
    return [Point(axes=axes, dtypes=dtypes) for axes in shapes for dtypes in pairings]


def tensors_of(
    op: Op,
    point: Point,
    placed: str = "plain",
    sparing: bool = True,
    changed: Collection[str] = (),
    recorded: EngineCall | None = None,
) -> Layout:
    """The layout of the tensors. With `sparing`, large read-only ones are not sent in full: weights
    unless they are among the `changed`, whose values are not the usual ones. Nor is the poison of
    large ones that are only written. Those of a `recorded` call lie as the engine had them.
    """
    contract = op.contract
    wanted = []
    for tensor in contract.tensors:
        shape, dtype = contract.shape(tensor, point), point.dtypes[tensor.dtype]
        strides = strides_of(tensor, shape, dtype, placed)
        shift = SHIFT if placed == "shifted" and tensor.alignment < 16 else 0
        if recorded is not None:
            strides, shift = recorded.placed(tensor.name)
        as_plain = strides == strides_of(tensor, shape, dtype) and not shift
        size = math.prod(shape) * DTYPES[dtype].item_bytes
        usual = tensor.name not in changed
        travel: Travel = "bytes"
        if sparing and tensor.access == "read" and as_plain:
            travel = _travel(tensor, dtype, size, usual, recorded is None)
        elif sparing and tensor.access == "write" and size >= CHECKED_BYTES:
            travel = "poisoned"
        wanted.append(
            Wanted(
                name=tensor.name,
                dtype=dtype,
                shape=shape,
                strides=strides,
                shift=shift,
                travel=travel,
                constant=tensor.constant,
            )
        )
    return layout(wanted)


def _travel(tensor: TensorSpec, dtype: str, size: int, usual: bool, drawn: bool) -> Travel:
    weight = tensor.constant and tensor.values == "any" and DTYPES[dtype].wide_mantissa > 0
    mixed = drawn and (tensor.values == "bits" or (usual and weight))
    if mixed and size >= MIXED_BYTES and size % 8 == 0:
        return "mixed"
    return "checked" if size >= CHECKED_BYTES else "bytes"


def make_inputs(op: Op, case: Case, device: str) -> dict[str, Tensor]:
    """The contents of the tensors before the call."""
    if case.recorded is not None:
        given = {name: value.to(device) for name, value in case.recorded.inputs.items()}
        for name, value in case.recorded.outputs.items():
            given.setdefault(name, torch.zeros_like(value, device=device))
        return {tensor.name: given[tensor.name] for tensor in op.contract.tensors}
    values = regimes.make(op, case.point, case.seed, case.regime, device, case.only)
    if case.changed is None:
        return values
    chooser = random.Random(case.changed)
    for tensor in op.contract.tensors:
        if tensor.values != "given" and tensor.access != "write" and values[tensor.name].numel():
            value, dtype = values[tensor.name], dtype_of(values[tensor.name].dtype)
            nudge(value, chooser.randrange(value.numel() * dtype.numbers))
    return values


@dataclass(frozen=True)
class Expected:
    """The correct values, and the accuracy baseline's."""

    reference: dict[str, Tensor]
    honest: dict[str, Tensor]
    """The accuracy baseline's; of a recorded call the engine's."""
    before: dict[str, Tensor]
    kept: dict[str, Tensor]
    """For tensors that are updated in part: where the bits of `before` must stay."""


def expect(op: Op, case: Case, inputs: dict[str, Tensor]) -> Expected:
    """Reference and accuracy baseline, both computed in the judge, where the inputs are."""
    scalars = scalars_by_name(op, case)
    if case.recorded is None:
        honest = baseline_values(op, case, inputs)
    else:
        honest = {
            name: value.to(inputs[name].device) for name, value in case.recorded.outputs.items()
        }
    with op_calls.running(op, "reference.py", "reference"):
        kept, given = op.kept(**inputs), op.reference(**inputs, **scalars)
    reference = op_calls.checked_results(op, "reference.py", "reference", given)
    if case.regime == "normal":
        op_calls.check_defined(op, reference, honest)
    return Expected(reference, honest, inputs, kept)


def baseline_values(op: Op, case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the op's accuracy baseline makes of inputs."""
    copies = {name: value.clone() for name, value in inputs.items()}
    with op_calls.running(op, "baselines.py", op.accuracy_name):
        run = op.accuracy(next(iter(inputs.values())).device.type)
        returned = run(*copies.values(), *scalars_by_name(op, case).values())
    return op_calls.written_by_baseline(op, op.accuracy_name, copies, returned)


def planted(op: Op, case: Case, inputs: dict[str, Tensor]) -> Values:
    """What the op's `control` gives, which must be told from right values."""
    with op_calls.running(op, "reference.py", "control"):
        given = op.control(**inputs, **scalars_by_name(op, case))
    return op_calls.checked_results(op, "reference.py", "control", given)


def value_problem(
    op: Op, cases: Sequence[Case], expected: Sequence[Expected], values: Sequence[Values]
) -> str | None:
    """What calls of one shape got wrong, by tensor, over all calls.

    Raises:
        UsageError: the op's reference, or a block scale of its contract, has another shape.
    """
    contract, befores = op.contract, [each.before for each in expected]
    reduction = contract.longest_sum(cases[0].point)
    ours = [{**before, **found} for before, found in zip(befores, values, strict=True)]
    theirs = [{**before, **each.honest} for before, each in zip(befores, expected, strict=True)]
    followed: Sequence[Values] = []
    if op.derived is not None:
        rule = partial(op.derived, **scalars_by_name(op, cases[0]))
        device = next(iter(expected[0].reference.values())).device
        right = [rule(**{n: value.to(device) for n, value in each.items()}) for each in ours]
        expected = [
            replace(each, reference={**each.reference, **its})
            for each, its in zip(expected, right, strict=True)
        ]
        if any(not dtype_of(ours[0][name].dtype).exact for name in right[0]):
            followed = [rule(**each) for each in theirs]
    for tensor in contract.compared:
        name, stored = tensor.name, dtype_of(ours[0][tensor.name].dtype)
        reference = torch.stack([each.reference[name] for each in expected])
        device = reference.device
        honest = numbers(contract, tensor, theirs, device, cases[0].point)
        value = numbers(contract, tensor, ours, device, cases[0].point)
        if followed and name in followed[0] and not stored.exact:
            own = torch.stack([each[name] for each in followed])
            honest = carried_over(honest, own, reference, stored)
        if value.shape != reference.shape:
            raise UsageError(
                f"the reference of {op.name} gives {list(reference.shape[1:])} numbers of {name}, "
                f"which holds {list(value.shape[1:])}",
                "correct reference.py or op.toml",
            )
        if name in expected[0].kept:
            kept = torch.stack([each.kept[name] for each in expected])
            now, before = (stacked(name, each, device) for each in (ours, befores))
            if problem := explain_touched(now, before, kept):
                return f"{name}: {problem}"
            # judge written elements alone, since unchanged ones would dilute the error
            if stored.numbers > 1:
                kept = kept.repeat_interleave(stored.numbers, -1)
            value, honest, reference = value[~kept], honest[~kept], reference[~kept]
        problem = explain_mismatch(
            value,
            honest,
            reference,
            reduction,
            exact=cases[0].regime == regimes.EXACT,
            alike=cases[0].regime in regimes.ALIKE,
            flushed=0.0 if contract.accuracy.subnormals == "kept" else FLUSHED,
            stored=stored,
            scaled=bool(contract.scales_of(name)),
            rewritten=contract.cost.rewritable and cases[0].regime == regimes.INFINITE,
        )
        if problem:
            return f"{name}: {problem}"
    return None


def scalars_by_name(op: Op, case: Case) -> dict[str, Any]:
    return {spec.name: value for spec, value in zip(op.contract.scalars, case.scalars, strict=True)}
