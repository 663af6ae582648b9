"""What a recording says of an op's contract: what engines hand to it, and what no regime tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from patcher.bench.judge import regimes
from patcher.bench.judge.call_recording import (
    CallRecording,
    EngineCall,
    RecordedTensor,
    op_of,
    read_recording,
)
from patcher.bench.judge.engine_cases import EngineError, engine_error
from patcher.bench.judge.placement import SHIFT, placements, strides_of, strides_that_matter
from patcher.bench.ops.codes import decode
from patcher.bench.ops.contract import Contract, TensorSpec
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.ops.op import Op, load_op
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.workload import pick_device

Finding = Literal["confirmed", "coarser", "refuted", "left to the engine"]
"""`confirmed`: the engine's outputs would pass as a candidate's. `coarser`: they err by more than
the accuracy baseline allows, and are the op's. `refuted`: they are not the op's. `left to the
engine`: the contract's guards allow no kernel there."""


class TensorValues(Record):
    """One tensor over all calls of a group."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    shift: int
    """Bytes from the last multiple of 16 to the first element."""
    low: float | None
    """The least finite number; None: there is none."""
    high: float | None
    not_finite: int
    """Numbers that are not finite."""


class ObservedGroup(Record):
    """Calls of equal shapes, strides and dtypes."""

    calls: tuple[int, ...]
    """Their numbers at the point."""
    sizes: str
    """Axes and dtypes."""
    finding: Finding
    """The worst of its calls."""
    tensors: tuple[TensorValues, ...]
    not_judged: tuple[str, ...]
    """Sizes, strides and values that no sweep, hidden shape or regime has, in words."""
    error: dict[str, float]
    """The engine's error relative to float64, root mean square, by written tensor: the worst."""
    baseline: dict[str, float]
    """The same of the op's accuracy baseline."""
    problem: str = ""
    """Why it is not confirmed."""


class ContractObservation(Record):
    """What a recording says of its op."""

    schema_version: int = SCHEMA_VERSION
    op: str
    engine: str
    engine_version: str
    point: str
    device: str
    seen: int
    """Calls while it was made, recorded or not."""
    left_out: dict[str, int]
    """Calls that were chosen and could not be recorded, by reason."""
    groups: tuple[ObservedGroup, ...]

    @property
    def refuted(self) -> bool:
        """Whether the engine computes something else than the contract says."""
        return any(group.finding == "refuted" for group in self.groups)


def observe(file: Path) -> ContractObservation:
    """Compare a recording with its op's contract, sweeps, regimes and reference.

    Raises:
        UsageError: it is no recording, or not of an op of the library.
    """
    op = load_op(op_of(file))
    recording, calls = read_recording(file, op.contract)
    groups: dict[object, list[EngineCall]] = {}
    for call in calls:
        alike = [(t.shape, t.strides, t.shift, t.dtype) for t in call.record.tensors]
        groups.setdefault((tuple(alike), call.record.refusal), []).append(call)
    # where the engine ran on a GPU, the accuracy baseline is a GPU's
    device = "cpu" if recording.device == "cpu" else pick_device(None)
    found = tuple(_group(op, alike, device) for alike in groups.values())
    return _observation(recording, found)


def _observation(
    recording: CallRecording, groups: tuple[ObservedGroup, ...]
) -> ContractObservation:
    return ContractObservation(
        op=recording.op,
        engine=recording.engine,
        engine_version=recording.engine_version,
        point=recording.point,
        device=recording.device,
        seen=recording.seen,
        left_out=recording.left_out,
        groups=groups,
    )


def _group(op: Op, calls: Sequence[EngineCall], device: str) -> ObservedGroup:
    first = calls[0]
    numbers = tuple(call.record.number for call in calls)
    tensors = tuple(_values(tensor, calls) for tensor in first.record.tensors)
    if first.point is None:
        sizes = " ".join(f"{each.name}{list(each.shape)}" for each in tensors)
        return ObservedGroup(
            calls=numbers,
            sizes=sizes,
            finding="left to the engine",
            tensors=tensors,
            not_judged=(),
            error={},
            baseline={},
            problem=first.record.refusal,
        )
    errors = [engine_error(op, call, device) for call in calls]
    worst = max(errors, key=lambda error: (error.refuted, bool(error.problem)))
    finding: Finding = "refuted" if worst.refuted else "coarser" if worst.problem else "confirmed"
    not_judged = (
        *_sizes(op.contract, first.point.axes),
        *_places(op, first),
        *_beyond(op, first, tensors),
    )
    return ObservedGroup(
        calls=numbers,
        sizes=first.point.label(),
        finding=finding,
        tensors=tensors,
        not_judged=not_judged,
        error=_worst([each.relative for each in errors]),
        baseline=_worst([each.baseline for each in errors]),
        problem=worst.problem,
    )


def _worst(errors: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in errors) for name in errors[0]}


def _values(tensor: RecordedTensor, calls: Sequence[EngineCall]) -> TensorValues:
    """Of a tensor that is written, what the engine left there."""
    held = [call.outputs.get(tensor.name, call.inputs.get(tensor.name)) for call in calls]
    low, high, not_finite = None, None, 0
    for value in held:
        assert value is not None
        numbers = decode(value).double()
        finite = numbers[numbers.isfinite()]
        not_finite += numbers.numel() - finite.numel()
        if finite.numel():
            least, most = float(finite.min()), float(finite.max())
            low = least if low is None else min(low, least)
            high = most if high is None else max(high, most)
    return TensorValues(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        strides=tensor.strides,
        shift=tensor.shift,
        low=low,
        high=high,
        not_finite=not_finite,
    )


def _sizes(contract: Contract, axes: dict[str, int]) -> Iterator[str]:
    """Axes whose size no sweep and no hidden shape has. Those of a swept axis are drawn anew for
    each verdict, up to the largest."""
    for axis, size in axes.items():
        swept = {value for each in contract.sweeps if each.axis == axis for value in each.values}
        judged = {each.fixed[axis] for each in contract.sweeps if axis in each.fixed} | swept
        judged |= {each.axes[axis] for each in contract.hidden if axis in each.axes}
        if judged and size > max(judged):
            yield f"{axis} = {size:,}: the largest that is judged is {max(judged):,}"
        elif size not in judged and not (swept and size <= max(swept)):
            yield f"{axis} = {size:,}: no sweep or hidden shape has it"


def _places(op: Op, call: EngineCall) -> Iterator[str]:
    for tensor, spec in zip(call.record.tensors, op.contract.tensors, strict=True):
        tried = {
            placed: strides_of(spec, tensor.shape, tensor.dtype, placed)
            for placed in ("plain", *placements(op))
        }
        matter = strides_that_matter(tensor.shape, tensor.strides)
        if matter not in [strides_that_matter(tensor.shape, each) for each in tried.values()]:
            judged = ", ".join(map(str, dict.fromkeys(map(list_text, tried.values()))))
            yield f"{tensor.name} has strides {list_text(tensor.strides)}: judged are {judged}"
        shifts = {0} | ({SHIFT * DTYPES[tensor.dtype].item_bytes} if _may_shift(spec) else set())
        if tensor.shift not in shifts and 0 not in tensor.shape:
            yield f"{tensor.name} begins {tensor.shift} bytes after a multiple of 16"


def _may_shift(spec: TensorSpec) -> bool:
    return spec.alignment < 16


def list_text(values: Sequence[int]) -> str:
    return str(list(values))


def _beyond(op: Op, call: EngineCall, tensors: Sequence[TensorValues]) -> Iterator[str]:
    """Tensors whose numbers are larger than any regime makes them."""
    assert call.point is not None
    reach: dict[str, float] = {}
    for regime in regimes.regimes_of(op):
        for name, value in regimes.make(op, call.point, 1, regime, "cpu").items():
            reach[name] = max(reach.get(name, 0.0), _largest(value))
    for tensor, spec in zip(tensors, op.contract.tensors, strict=True):
        if spec.access == "write" or tensor.low is None or tensor.high is None:
            continue
        largest = max(-tensor.low, tensor.high)
        if spec.values == "any" and largest > reach[tensor.name]:
            yield f"{tensor.name} reaches {largest:.3g}: regimes reach {reach[tensor.name]:.3g}"
        if tensor.not_finite and spec.values != "any":
            yield f"{tensor.name} has {tensor.not_finite} numbers that are not finite"


def _largest(value: Tensor) -> float:
    numbers = decode(value).double()
    finite = numbers[numbers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


__all__ = [
    "ContractObservation",
    "EngineError",
    "Finding",
    "ObservedGroup",
    "TensorValues",
    "observe",
]
