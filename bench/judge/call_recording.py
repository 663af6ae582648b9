"""Calls of an op as a running engine made them: what its own code was given, and what it gave.

A recording is one safetensors file, so that reading it runs nothing. Its header says what was
called, as JSON; its tensors are the values, each kept once, contiguous. Strides are in the header.

While it is made, and after a process that was killed, it is a folder beside that file,
`FILE.parts`: a safetensors file for each call, with the values that no earlier one has and the
header so far. So a call is written once, while the engine waits, and a killed process leaves the
calls before. What reads a recording takes the folder where there is one, by the file's name or its
own.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError

from patcher.bench.errors import UsageError
from patcher.bench.judge.placement import contiguous, strides_that_matter
from patcher.bench.ops.codes import as_bytes
from patcher.bench.ops.contract import Contract, Point
from patcher.bench.ops.dtypes import DTYPES
from patcher.bench.records import SCHEMA_VERSION, Record, problem, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

HEADER = "patcher"
"""The entry of the file's metadata."""
_SUFFIX = ".safetensors"
ALIGNED = 16
"""Bytes: `shift` is counted from the multiple of this before a tensor."""


class RecordedTensor(Record):
    """One tensor of a call."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    shift: int = Field(default=0, ge=0, lt=ALIGNED)
    """Bytes from the last multiple of 16 to the first element."""
    given: str = ""
    """Name of its values before the call; empty for one that is only written."""
    made: str = ""
    """Name of its values after the call; empty for one that is only read."""


class RecordedCall(Record):
    """One call, with its tensors in the contract's order."""

    number: int
    """Of the call at its point since the recording began, from 0."""
    tensors: tuple[RecordedTensor, ...]
    scalars: tuple[float, ...]
    refusal: str = ""
    """Why the contract's guards leave such a call to the engine, whatever the kernel."""


class CallRecording(Record):
    """What is known of a recording beside the values."""

    schema_version: Literal[1] = SCHEMA_VERSION  # type: ignore[assignment]
    op: str
    signature: str
    """`Contract.signature` when it was made."""
    engine: str
    engine_version: str
    point: str
    """The patch point that told inputs and outputs."""
    device: str
    """`cpu`, or the name of the GPU."""
    torch_version: str
    seen: int
    """Calls since it began, recorded or not."""
    left_out: dict[str, int]
    """Calls that were chosen and could not be recorded, by reason."""
    calls: tuple[RecordedCall, ...]


@dataclass(frozen=True, eq=False)
class EngineCall:
    """One recorded call with its values, contiguous and on the CPU."""

    record: RecordedCall
    point: Point | None
    """None for a call whose shapes or dtypes are not the contract's; it has a refusal."""
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def label(self) -> str:
        """The call with its sizes, and the strides of what is not contiguous."""
        where = "" if self.point is None else f" {self.point.label()}"
        apart = [
            f", {each.name} with strides {list(each.strides)}"
            for each in self.record.tensors
            if strides_that_matter(each.shape, each.strides)
            != strides_that_matter(each.shape, contiguous(each.shape))
        ]
        return f"recorded call {self.record.number:,}{where}{''.join(apart)}"

    def placed(self, name: str) -> tuple[tuple[int, ...], int]:
        """Strides and misalignment of a tensor, in elements."""
        [found] = [each for each in self.record.tensors if each.name == name]
        return found.strides, found.shift // DTYPES[found.dtype].item_bytes


def kept(tensor: Tensor) -> Tensor:
    """The values of any tensor, contiguous, on the CPU, in memory of their own."""
    import torch

    held = as_bytes(tensor.detach().contiguous())
    return torch.empty(held.shape, dtype=held.dtype).copy_(held).view(tensor.dtype)


def dtype_name(tensor: Tensor) -> str:
    """The name of a tensor's dtype, as contracts have it."""
    return str(tensor.dtype).removeprefix("torch.")


def name_of(value: Tensor) -> str:
    """The name of a contiguous tensor's values: equal values have one."""
    import torch

    data = as_bytes(value).reshape(-1).view(torch.uint8)
    head = f"{value.dtype} {tuple(value.shape)} ".encode()
    return hashlib.sha256(head + data.numpy().tobytes()).hexdigest()[:24]


def write_recording(path: Path, recording: CallRecording, values: Mapping[str, Tensor]) -> None:
    """Write the whole file, or leave the one that was there; then its parts go."""
    _write(path, recording, values)
    _discard(parts_of(path))


def write_part(path: Path, recording: CallRecording, fresh: Mapping[str, Tensor]) -> None:
    """Write the last call of a recording.

    Args:
        path: the file of the whole recording, beside which its parts lie.
        recording: what is known so far.
        fresh: the values of the last call that no call before it has.
    """
    number = len(recording.calls) - 1
    if number == 0:  # a process that was killed may have left others
        _discard(parts_of(path))
    _write(parts_of(path) / f"{number:04d}{_SUFFIX}", recording, fresh)


def parts_of(path: Path) -> Path:
    """The folder of the parts of a recording that is not whole yet."""
    return path.with_name(f"{path.name}.parts")


def _write(path: Path, recording: CallRecording, values: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    held = {name: as_bytes(value) for name, value in values.items()}
    write_atomically(path, save(held, metadata={HEADER: recording.model_dump_json()}))


def _discard(folder: Path) -> None:
    """Remove a folder of parts, if there is one; it is never there by halves."""
    gone = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone)


def read_recording(path: Path, contract: Contract) -> tuple[CallRecording, list[EngineCall]]:
    """Read a recording of an op.

    Raises:
        UsageError: it is no recording, of another op, of an earlier contract, or damaged.
    """
    recording, values = _read(path)
    if recording.op != contract.name:
        raise UsageError(f"{path} has calls of {recording.op}, not {contract.name}", _AGAIN)
    if recording.signature != contract.signature():
        raise UsageError(
            f"{path} has calls of {recording.signature}, but the op is now {contract.signature()}",
            _AGAIN,
        )
    try:
        return recording, [_whole(contract, call, values) for call in recording.calls]
    except (ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"{path} is damaged: {error}", _AGAIN) from error


def op_of(path: Path) -> str:
    """The op whose calls a file holds.

    Raises:
        UsageError: it is no recording.
    """
    return _read(path)[0].op


_AGAIN = "record the calls again: see docs/tutorials/write-an-op.md"


def _read(path: Path) -> tuple[CallRecording, dict[str, Tensor]]:
    folder = path if path.is_dir() else parts_of(path)
    parts = [_read_file(each) for each in sorted(folder.glob(f"*{_SUFFIX}")) or [path]]
    values = {name: value for _, held in parts for name, value in held.items()}
    return parts[-1][0], values


def _read_file(path: Path) -> tuple[CallRecording, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER, "")
            recording = CallRecording.model_validate_json(header)
            return recording, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", _AGAIN) from error
    except (SafetensorError, ValidationError) as error:
        raise UsageError(f"{path} is no recording: {problem(error)}", _AGAIN) from error


def _whole(contract: Contract, call: RecordedCall, values: Mapping[str, Tensor]) -> EngineCall:
    names = [tensor.name for tensor in contract.tensors]
    if [tensor.name for tensor in call.tensors] != names:
        raise ValueError(f"call {call.number} is not of {', '.join(names)}")
    if len(call.scalars) != len(contract.scalars):
        raise ValueError(f"call {call.number} has {len(call.scalars)} scalars")
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for tensor, spec in zip(call.tensors, contract.tensors, strict=True):
        if (spec.access != "write") != bool(tensor.given):
            raise ValueError(f"call {call.number} lacks values of {tensor.name} before it")
        if (spec.access != "read") != bool(tensor.made):
            raise ValueError(f"call {call.number} lacks values of {tensor.name} after it")
        for name, into in ((tensor.given, inputs), (tensor.made, outputs)):
            if name:
                into[tensor.name] = _value(tensor, values[name])
    if call.refusal:
        return EngineCall(call, None, inputs, outputs)
    for tensor in call.tensors:
        _require_apart(tensor)
    return EngineCall(call, _point(contract, call), inputs, outputs)


def _value(tensor: RecordedTensor, held: Tensor) -> Tensor:
    wanted = DTYPES[tensor.dtype].torch_dtype
    value = held if held.dtype == wanted else held.view(wanted)
    if tuple(value.shape) != tensor.shape:
        raise ValueError(f"{tensor.name} has {list(value.shape)} values of {list(tensor.shape)}")
    return value


def _point(contract: Contract, call: RecordedCall) -> Point:
    dtypes: dict[str, str] = {}
    for tensor, spec in zip(call.tensors, contract.tensors, strict=True):
        if dtypes.setdefault(spec.dtype, tensor.dtype) != tensor.dtype:
            raise ValueError(f"{tensor.name} in {tensor.dtype} beside {dtypes[spec.dtype]}")
    if dtypes not in contract.dtype_choices():
        raise ValueError(f"dtypes {dtypes} are not the contract's")
    axes = contract.axes_of([tensor.shape for tensor in call.tensors])
    point = Point(axes=axes, dtypes=dtypes)
    for tensor, spec in zip(call.tensors, contract.tensors, strict=True):
        if contract.shape(spec, point) != tensor.shape:
            raise ValueError(f"{tensor.name} is {list(tensor.shape)} at {point.label()}")
    return point


def _require_apart(tensor: RecordedTensor) -> None:
    """Check that no two elements share a place, so that values can be put there."""
    if len(tensor.strides) != len(tensor.shape) or min(tensor.strides, default=1) < 0:
        raise ValueError(f"{tensor.name} has strides {list(tensor.strides)}")
    if tensor.shift % DTYPES[tensor.dtype].item_bytes:
        raise ValueError(f"{tensor.name} begins within an element")
    extent = 1
    pairs = zip(tensor.strides, tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in pairs if size > 1):
        if stride < extent and 0 not in tensor.shape:
            raise ValueError(f"elements of {tensor.name} share a place")
        extent += (size - 1) * stride
