"""Judge on what an engine was seen to do: recorded calls as cases, and the engine's own error.

The engine's recorded outputs take the place of the accuracy baseline: a candidate may err against
float64 as the code that it replaces did. So they must be the op's at all. Where they are further
from float64 than `REFUTED`, the recording refutes the contract, and nothing is judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from patcher.bench.errors import UsageError, VerificationError
from patcher.bench.judge import op_calls
from patcher.bench.judge.accuracy import numbers
from patcher.bench.judge.call_recording import CallRecording, EngineCall, read_recording
from patcher.bench.judge.cases import (
    RECORDED,
    Case,
    Expected,
    baseline_values,
    expect,
    make_inputs,
    scalars_by_name,
    tensors_of,
    value_problem,
)
from patcher.bench.judge.memory_file import CAPACITY
from patcher.bench.ops.dtypes import dtype_of
from patcher.bench.ops.op import Op
from patcher.bench.records import Record

REFUTED = 0.02
"""Error relative to the reference, root mean square, beyond which outputs are not the op's: as far
as layers may err that are tried on numbers. A dtype's own rounding errs less."""


class EngineError(Record):
    """How far the engine's outputs of one call are from float64."""

    relative: dict[str, float]
    """By written tensor: root mean square of the error, over that of the reference; of integers the
    share that differs."""
    baseline: dict[str, float]
    """The same of the op's accuracy baseline on these inputs."""
    problem: str = ""
    """What the judge would say of the engine's outputs, were they a candidate's."""

    @property
    def refuted(self) -> bool:
        """Whether the engine computed something else than the contract says."""
        return bool(self.problem) and not all(each <= REFUTED for each in self.relative.values())


def case_of(op: Op, call: EngineCall) -> Case:
    """A recorded call as a case.

    Raises:
        ValueError: the contract's guards leave it to the engine, so that no kernel is called.
    """
    if call.point is None:
        raise ValueError(call.record.refusal)
    scalars = tuple(
        int(value) if spec.type == "int" else value
        for spec, value in zip(op.contract.scalars, call.record.scalars, strict=True)
    )
    return Case(call.point, RECORDED, 0, scalars, recorded=call)


def engine_error(op: Op, call: EngineCall, device: str = "cpu") -> EngineError:
    """Compare the engine's outputs of a call with the op's float64 reference."""
    case = case_of(op, call)
    inputs = make_inputs(op, case, device)
    expected = expect(op, case, inputs)
    baseline = replace(expected, honest=baseline_values(op, case, inputs))
    outputs = {name: value.to(device) for name, value in call.outputs.items()}
    return EngineError(
        relative=_relative(op, case, expected, outputs),
        baseline=_relative(op, case, expected, baseline.honest),
        problem=value_problem(op, [case], [baseline], [outputs]) or "",
    )


def recorded_cases(op: Op, file: Path, device: str) -> tuple[CallRecording, list[Case]]:
    """The cases of a recording that a kernel of the op may be called for.

    Raises:
        UsageError: it cannot be read, or has no such call, or one that is too large to be judged.
        VerificationError: the engine's outputs refute the contract.
    """
    recording, calls = read_recording(file, op.contract)
    cases = [case_of(op, call) for call in calls if call.point is not None]
    if not cases:
        reasons = ", ".join(sorted({call.record.refusal for call in calls})) or "no call"
        raise UsageError(
            f"{file} has no call that a kernel of {op.name} may be called for: {reasons}",
            "see `patcher ops observe`",
        )
    for case in cases:
        assert case.recorded is not None
        if tensors_of(op, case.point, recorded=case.recorded).carried_bytes > CAPACITY:
            raise UsageError(
                f"{case.label()} is too large to be judged", "record with a smaller size limit"
            )
        error = engine_error(op, case.recorded, device)
        if error.refuted:
            raise VerificationError(
                f"{case.label()}: {recording.engine} {recording.engine_version} did not compute "
                f"{op.name} there: {error.problem}",
                "see `patcher ops observe`; correct the contract, or record again",
            )
    return recording, cases


def told(recording: CallRecording, cases: Iterable[Case]) -> str:
    """What a passed check says of the calls."""
    count = len(list(cases))
    left = len(recording.calls) - count
    beside = f"; {left} that no kernel is called for were left out" if left else ""
    return (
        f"{count} calls of {recording.engine} {recording.engine_version} at {recording.point}, by "
        f"the error of the engine's own outputs{beside}"
    )


def _relative(
    op: Op, case: Case, expected: Expected, values: dict[str, torch.Tensor]
) -> dict[str, float]:
    whole = {**expected.before, **values}
    right = dict(expected.reference)
    if op.derived is not None:
        with op_calls.running(op, "reference.py", "derived"):
            right |= op.derived(**whole, **scalars_by_name(op, case))
    found: dict[str, float] = {}
    for tensor in op.contract.compared:
        reference = right[tensor.name]
        value = numbers(op.contract, tensor, [whole], reference.device, case.point)[0].double()
        if tensor.name in expected.kept:
            written = ~expected.kept[tensor.name]
            if written.shape != value.shape:  # an item holds two numbers
                written = written.repeat_interleave(2, -1)
            value, reference = value[written], reference[written]
        if dtype_of(whole[tensor.name].dtype).exact:
            found[tensor.name] = float((value != reference).double().mean()) if len(value) else 0.0
            continue
        usual = reference.isfinite() & value.isfinite()
        error, size = (value - reference)[usual], reference[usual]
        rms = math.sqrt(float(size.square().mean())) if len(size) else 0.0
        rmse = math.sqrt(float(error.square().mean())) if len(error) else 0.0
        missed = bool((reference.isfinite() & ~value.isfinite()).any())
        found[tensor.name] = math.inf if missed else rmse / rms if rms else rmse
    return found
