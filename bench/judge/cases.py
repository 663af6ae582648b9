"""What a candidate is tried on: shapes, dtypes, regimes and secret seeds."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.judge.accuracy import explain_mismatch
from bench.judge.blob import Layout, layout, read_set, strayed, write_set
from bench.judge.process import Runner
from bench.op import Op, Point, Sweep


@dataclass(frozen=True)
class Case:
    """One seeded problem."""

    point: Point
    regime: str
    seed: int
    scalars: tuple[float, ...]

    def label(self) -> str:
        return f"{self.point.label()} {self.regime}"


def correctness_cases(op: Op, sweep: Sweep) -> list[Case]:
    """Every swept point, the hidden shapes in every dtype of the contract, every regime; seeds
    drawn now.

    The scalars vary too: one part of the cases uses another epsilon than the sweep's.
    """
    served = tuple(scalar.value for scalar in op.contract.scalars)
    other = tuple(scalar.value * 100 for scalar in op.contract.scalars)
    regimes = list(op.inputs.REGIMES)
    cases = [Case(point, "normal", _seed(), served) for point in sweep.points()]
    middle = sweep.points()[len(sweep.values) // 2]
    cases += [Case(middle, regime, _seed(), served) for regime in regimes if regime != "normal"]
    cases.append(Case(middle, "small", _seed(), other))
    choices = op.contract.dtype_choices()
    for index, shape in enumerate(op.contract.hidden):
        cases.append(Case(Point(axes=shape.axes, dtypes=sweep.dtypes), "normal", _seed(), served))
        dtypes = choices[index % len(choices)]
        regime = regimes[index % len(regimes)]
        if regime == "large" and "float16" in dtypes.values():
            regime = "normal"  # 1e3 squared leaves float16's range in the inputs' own sum
        cases.append(Case(Point(axes=shape.axes, dtypes=dtypes), regime, _seed(), served))
    return cases


def tensors_of(op: Op, point: Point) -> Layout:
    contract = op.contract
    return layout(
        [(t.name, point.dtypes[t.dtype], contract.shape(t, point)) for t in contract.tensors]
    )


def make_inputs(op: Op, case: Case) -> dict[str, Tensor]:
    values: dict[str, Tensor] = op.inputs.make(case.point, case.seed, case.regime)
    return values


def send(runner: Runner, plan: Layout, sets: list[dict[str, Tensor]]) -> None:
    """Write input sets where the runner reads them."""
    path = runner.folder / "in.bin"
    blob = np.memmap(path, dtype=np.uint8, mode="w+", shape=(len(sets), plan.set_bytes))
    for index, values in enumerate(sets):
        write_set(plan, blob[index], values)
    blob.flush()


@dataclass(frozen=True)
class Received:
    values: dict[str, Tensor]
    strayed: list[str]


def receive(runner: Runner, plan: Layout, sets: int) -> list[Received]:
    """Read what the runner handed back."""
    expected = sets * plan.set_bytes
    blob = np.fromfile(runner.folder / "out.bin", dtype=np.uint8)
    if blob.size != expected:
        raise ValueError(f"the runner handed back {blob.size} bytes, {expected} expected")
    blob = blob.reshape(sets, plan.set_bytes)
    return [Received(read_set(plan, row), strayed(plan, row)) for row in blob]


def guard_problem(op: Op, inputs: dict[str, Tensor], got: Received) -> str | None:
    """What it touched that the contract does not let it touch."""
    if got.strayed:
        return f"wrote outside of {', '.join(got.strayed)}"
    for tensor in op.contract.tensors:
        if tensor.access == "read":
            before, after = (
                x.contiguous().view(torch.uint8)
                for x in (inputs[tensor.name], got.values[tensor.name])
            )
            if not torch.equal(before, after):
                return f"changed {tensor.name}, which the contract says is only read"
    return None


@dataclass(frozen=True)
class Expected:
    """What is right, and how far the honest baseline is from it."""

    reference: dict[str, Tensor]
    honest: dict[str, Tensor]


def expect(op: Op, case: Case, inputs: dict[str, Tensor]) -> Expected:
    """Reference and honest baseline, both computed here, in the judge, on the CPU."""
    scalars = scalars_by_name(op, case)
    copies = {name: value.clone() for name, value in inputs.items()}
    returned = op.baselines[op.honest_baseline]("cpu")(*copies.values(), *scalars.values())
    written = [tensor.name for tensor in op.contract.written]
    honest = dict(zip(written, returned, strict=True)) if isinstance(returned, tuple) else copies
    return Expected(op.reference(**inputs, **scalars), honest)


def value_problem(op: Op, case: Case, expected: Expected, values: dict[str, Tensor]) -> str | None:
    """What it got wrong, tensor by tensor."""
    reduction = case.point.axes[op.contract.accuracy.reduction]
    for tensor in op.contract.written:
        problem = explain_mismatch(
            values[tensor.name],
            expected.honest[tensor.name],
            expected.reference[tensor.name],
            reduction,
        )
        if problem:
            return f"{tensor.name}: {problem}"
    return None


def scalars_by_name(op: Op, case: Case) -> dict[str, Any]:
    return {spec.name: value for spec, value in zip(op.contract.scalars, case.scalars, strict=True)}


def _seed() -> int:
    return secrets.randbits(62)
