"""Convert a Definition of flashinfer-bench to a contract."""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass

from patcher.bench import Contract
from patcher.integrate.formats.foreign_schema import Definition, ForeignWorkload

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
BATCHES = (1, 4, 8, 16, 32, 64, 128)


class Refused(Exception):
    """Something cannot be imported; the message is the reason, which an import lists."""


@dataclass(frozen=True)
class ForeignOp:
    """An imported op."""

    contract: Contract
    notes: list[str]
    """What a person should review, one sentence each."""


def op_of(definition: Definition, workloads: list[ForeignWorkload]) -> ForeignOp:
    """Build the contract of a Definition and its workloads.

    Raises:
        Refused: a contract or generic inputs cannot express the Definition.
    """
    name = re.sub(r"\W", "_", definition.name).lower()
    names = [name, *definition.inputs, *definition.outputs, *definition.axes]
    for each in names:
        if not each.isidentifier() or keyword.iskeyword(each) or not each.isascii():
            raise Refused(f"{each!r} cannot be a name in Python and C++")
    _check(definition)
    tensors = []
    scalars = []
    for given, spec in definition.inputs.items():
        if spec.shape is None:
            scalars.append(_scalar(given, spec.dtype, workloads, spec.description or ""))
            continue
        if spec.dtype not in FLOATS:
            raise Refused(f"{given} is {spec.dtype}: a person must define its values")
        if any(
            each.inputs.get(given) and each.inputs[given].type != "random" for each in workloads
        ):
            raise Refused(
                f"the workloads supply {given} as a file; an op's inputs.py must generate it"
            )
        tensors.append(_tensor(given, spec.dtype, spec.shape, "read", spec.description))
    for output, spec in definition.outputs.items():
        if spec.shape is None or spec.dtype not in (*FLOATS, *INTEGERS):
            raise Refused(
                f"output {output} is a scalar or {spec.dtype}, which contracts do not have"
            )
        tensors.append(_tensor(output, spec.dtype, spec.shape, "write", spec.description))
    swept, values, fixed = _sweep(definition, workloads)
    dtypes = sorted({str(tensor["dtype"]) for tensor in tensors})
    point = {"dtypes": {dtype: dtype for dtype in dtypes}, "axis": swept, "values": values}
    sweeps = [
        {"name": device, "device": device, "fixed": fixed, **point} for device in ("cpu", "cuda")
    ]
    guards, unread = _guards(definition)
    longest = max(fixed.items(), key=lambda item: item[1])[0] if fixed else swept
    contract = Contract.model_validate(
        {
            "schema_version": 1,
            "name": name,
            "operation": definition.op_type,
            "summary": definition.description or f"{definition.name} of flashinfer-bench",
            "source": f"flashinfer-bench Definition {definition.name}",
            "dtypes": {dtype: [dtype] for dtype in dtypes},
            "tensors": tensors,
            "scalars": scalars,
            "sweeps": sweeps,
            "guards": {"axes": guards},
            "accuracy": {"reduction": longest},
            "cost": {"bytes": _bytes(tensors), "flops": "0"},
        }
    )
    notes = [
        f"accuracy.reduction is a guess ({longest}), cost.flops is unknown (0)",
        "control is the reference with two bits fewer in its outputs; the only regime is normal",
        "the yardstick and only baseline is the Definition's own reference, which the judge runs "
        "as trusted code: read it first",
    ]
    if unread:
        notes.append(f"constraints that no guard expresses: {'; '.join(unread)}")
    for axis, size in definition.axes.items():
        if size.description:
            notes.append(f"the description of axis {axis} is not imported: {size.description}")
    if definition.tags:
        notes.append(f"tags are not imported: {', '.join(definition.tags)}")
    return ForeignOp(contract, notes)


def _check(definition: Definition) -> None:
    """Refuse what flashinfer-bench refuses, too."""
    try:
        tree = ast.parse(definition.reference)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"its reference is not valid Python: {error}") from error
    if "run" not in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}:
        raise Refused("its reference has no function run")
    for axis, size in definition.axes.items():
        if (size.type == "const") != (size.value is not None):
            raise Refused(f"axis {axis} is {size.type} with the value {size.value}")
    for name, spec in (*definition.inputs.items(), *definition.outputs.items()):
        if unknown := set(spec.shape or ()) - set(definition.axes):
            raise Refused(f"{name} has an axis {unknown.pop()}, which is not defined")


def _guards(definition: Definition) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Guards of axes, and the constraints that no guard expresses."""
    guards: dict[str, dict[str, int]] = {}
    unread = []
    for constraint in definition.constraints:
        match = re.fullmatch(r"(\w+) (% (\d+) ==|<=|>=) (\d+)", constraint.strip())
        axis = match[1] if match else ""
        if match is None or axis not in definition.axes or (match[3] and match[4] != "0"):
            unread.append(constraint)
            continue
        kind = {"<=": "maximum", ">=": "minimum"}.get(match[2], "multiple_of")
        if kind in guards.setdefault(axis, {}):
            unread.append(constraint)
        else:
            guards[axis][kind] = int(match[3] or match[4])
    return guards, unread


def _tensor(
    name: str, dtype: str, shape: tuple[str, ...], access: str, summary: str | None
) -> dict[str, object]:
    spec: dict[str, object] = {"name": name, "dtype": dtype, "shape": list(shape), "access": access}
    return spec | {"summary": summary or ""}


def _scalar(
    name: str, dtype: str, workloads: list[ForeignWorkload], summary: str
) -> dict[str, object]:
    if dtype not in (*FLOATS, *INTEGERS):
        raise Refused(f"scalar {name} is {dtype}, which contracts do not have")
    given = [each.inputs[name].value for each in workloads if name in each.inputs]
    values = {float(value) for value in given if value is not None}
    if len(values) != 1:
        problem = "no workload has" if not values else "the workloads differ in"
        raise Refused(f"{problem} the value of scalar {name}")
    kind = "float" if dtype in FLOATS else "int"
    return {"name": name, "type": kind, "value": values.pop(), "summary": summary}


def _sweep(
    definition: Definition, workloads: list[ForeignWorkload]
) -> tuple[str, list[int], dict[str, int]]:
    """The swept axis, its values, and the sizes of the other axes."""
    fixed = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    var = [name for name, axis in definition.axes.items() if axis.type == "var"]
    seen = {
        name: sorted({each.axes[name] for each in workloads if name in each.axes}) for name in var
    }
    varying = [name for name in var if len(seen[name]) != 1]
    if len(varying) > 1:
        raise Refused(f"{' and '.join(varying)} vary; a sweep of patcher varies one axis")
    if not var and not fixed:
        raise Refused("it has no axes")
    axis = varying[0] if varying else (var or list(fixed))[0]
    values = seen.get(axis) or ([fixed[axis]] if axis in fixed else list(BATCHES))
    others = fixed | {name: sizes[0] for name, sizes in seen.items() if name not in varying}
    return axis, values, {name: size for name, size in others.items() if name != axis}


def _bytes(tensors: list[dict[str, object]]) -> str:
    """Arithmetic for the size of all tensors; a dtype's symbol is its item size."""
    products = []
    for tensor in tensors:
        shape = tensor["shape"]
        assert isinstance(shape, list)
        products.append(" * ".join([*shape, str(tensor["dtype"])]))
    return " + ".join(products)
