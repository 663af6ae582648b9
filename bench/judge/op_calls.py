"""Calls of an op's own functions. What is wrong with an op is never a verdict on a kernel: it is an
error that names the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.ops.codes import as_bytes
from patcher.bench.ops.contract import Point
from patcher.bench.ops.dtypes import dtype_of
from patcher.bench.ops.op import Op
from patcher.bench.ops.op_files import line_of


@contextmanager
def running(op: Op, file: str, function: str) -> Iterator[None]:
    """Tell what a function of an op raises as a UsageError that names its file."""
    try:
        yield
    except (PatcherError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        path = op.folder / file
        raise UsageError(
            f"{function} in {path} raises {type(error).__name__}: {error}",
            f"fix {line_of(error, path)}",
        ) from error


def checked_inputs(op: Op, point: Point, values: Any) -> dict[str, Tensor]:
    """What `make` gave, in the contract's order.

    Raises:
        UsageError: it is not exactly the contract's tensors, in their shapes and dtypes.
    """
    names = [tensor.name for tensor in op.contract.tensors]
    if not isinstance(values, dict) or values.keys() != set(names):
        gave = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise _wrong(
            op, "inputs.py", f"make gives {gave or 'nothing'}, not a tensor for {', '.join(names)}"
        )
    for tensor in op.contract.tensors:
        value, shape = values[tensor.name], op.contract.shape(tensor, point)
        dtype = point.dtypes[tensor.dtype]
        if not isinstance(value, Tensor):
            raise _wrong(op, "inputs.py", f"make gives a {type(value).__name__} as {tensor.name}")
        if tuple(value.shape) != tuple(shape) or dtype_of(value.dtype).name != dtype:
            raise _wrong(
                op,
                "inputs.py",
                f"make gives {tensor.name} as {_kind(value)} at {point.label()}, and the contract "
                f"says {dtype} {list(shape)}",
            )
    return {name: values[name] for name in names}


def check_seeded(op: Op, first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Check that `make` gave equal bits for equal seeds.

    Raises:
        UsageError: it did not, so that no call could be repeated.
    """
    for tensor in op.contract.tensors:
        one, other = first[tensor.name], again[tensor.name]
        if tensor.access != "write" and not torch.equal(as_bytes(one), as_bytes(other)):
            raise _wrong(
                op,
                "inputs.py",
                f"make gives another {tensor.name} for the same seed",
                "draw all random numbers from `generator`",
            )


def checked_results(op: Op, file: str, function: str, values: Any) -> dict[str, Tensor]:
    """What `reference` or `control` gave.

    Raises:
        UsageError: it lacks a tensor that the op's calls are compared by, or the reference has one
            in less than float64.
    """
    needed = [tensor.name for tensor in op.contract.compared]
    if not isinstance(values, dict):
        raise _wrong(op, file, f"{function} gives a {type(values).__name__}, not a dict of tensors")
    missing = [name for name in needed if not isinstance(values.get(name), Tensor)]
    if missing and op.derived is None:
        gave = ", ".join(map(str, values)) or "nothing"
        raise _wrong(op, file, f"{function} gives no {missing[0]}, but {gave}")
    for name in needed if function == "reference" else ():
        if name in values and values[name].dtype != torch.float64:
            dtype = str(values[name].dtype).removeprefix("torch.")
            fix = "compute in float64, from inputs that .double() widens"
            raise _wrong(op, file, f"{function} gives {name} in {dtype}", fix)
    return values


def written_by_baseline(
    op: Op, name: str, arguments: dict[str, Tensor], returned: Any
) -> dict[str, Tensor]:
    """What a baseline's call left: its tuple, or else the arguments.

    Raises:
        UsageError: it returned something else than the written tensors.
    """
    if isinstance(returned, Tensor):
        places = {value.data_ptr() for value in arguments.values()}
        if returned.numel() and returned.data_ptr() not in places:
            raise _wrong(
                op, "baselines.py", f"{name} returns a tensor of its own", "return a tuple of it"
            )
    if not isinstance(returned, tuple):
        return arguments
    written = [tensor.name for tensor in op.contract.written]
    shapes = [list(value.shape) for value in returned if isinstance(value, Tensor)]
    wanted = [list(arguments[each].shape) for each in written]
    if len(returned) != len(written) or shapes != wanted:
        raise _wrong(
            op,
            "baselines.py",
            f"{name} returns shapes {shapes} for {', '.join(written)} of {wanted}",
        )
    return dict(zip(written, returned, strict=True))


def check_defined(op: Op, reference: dict[str, Tensor], honest: Mapping[str, Tensor]) -> None:
    """Check on usual values that the reference has a number where the accuracy baseline has.

    Raises:
        UsageError: it has NaN there.
    """
    for tensor in op.contract.compared:
        name = tensor.name
        if name not in reference or name not in honest or dtype_of(honest[name].dtype).narrow:
            continue
        right, theirs = reference[name], honest[name]
        if right.shape == theirs.shape and bool((right.isnan() & ~theirs.isnan()).any()):
            raise _wrong(
                op,
                "reference.py",
                f"reference gives NaN in {name} on normal inputs, where {op.accuracy_name} gives "
                "numbers",
            )


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _wrong(op: Op, file: str, what: str, hint: str = "") -> UsageError:
    return UsageError(f"{op.folder / file}: {what}", hint or f"fix {file} or op.toml")
