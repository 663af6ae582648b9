"""A foreign Definition as a contract of ours."""

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
    """Why something cannot be imported; a value for whoever lists what was refused."""


@dataclass(frozen=True)
class ForeignOp:
    contract: Contract
    notes: list[str]


def op_of(definition: Definition, workloads: list[ForeignWorkload]) -> ForeignOp:
    """The contract that a Definition and its workloads amount to.

    Raises:
        Refused: it has what a contract or generic inputs cannot express.
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
            raise Refused(f"{given} is {spec.dtype}: only a person can say what values it may have")
        if any(
            each.inputs.get(given) and each.inputs[given].type != "random" for each in workloads
        ):
            raise Refused(
                f"the workloads give {given} as a file, which an op's inputs.py must make"
            )
        tensors.append(_tensor(given, spec.dtype, spec.shape, "read", spec.description))
    for made, spec in definition.outputs.items():
        if spec.shape is None or spec.dtype not in (*FLOATS, *INTEGERS):
            raise Refused(f"output {made} is a scalar or {spec.dtype}, which a contract cannot say")
        tensors.append(_tensor(made, spec.dtype, spec.shape, "write", spec.description))
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
        f"accuracy.reduction is a guess ({longest}), cost.flops is not known (0)",
        "control is the reference with two bits less in its outputs; regimes: normal only",
        "the yardstick and only baseline is the Definition's own reference, which the judge runs "
        "as trusted code: read it first",
    ]
    if unread:
        notes.append(f"constraints that no guard expresses: {'; '.join(unread)}")
    for axis, size in definition.axes.items():
        if size.description:
            notes.append(f"a contract has no place for what axis {axis} is: {size.description}")
    if definition.tags:
        notes.append(f"tags are not carried: {', '.join(definition.tags)}")
    return ForeignOp(contract, notes)


def _check(definition: Definition) -> None:
    """What flashinfer-bench would refuse, too."""
    try:
        tree = ast.parse(definition.reference)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"its reference is no Python: {error}") from error
    if "run" not in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}:
        raise Refused("its reference has no function run")
    for axis, size in definition.axes.items():
        if (size.type == "const") != (size.value is not None):
            raise Refused(f"axis {axis} is {size.type} with the value {size.value}")
    for name, spec in (*definition.inputs.items(), *definition.outputs.items()):
        if unknown := set(spec.shape or ()) - set(definition.axes):
            raise Refused(f"{name} has an axis {unknown.pop()}, which is not defined")


def _guards(definition: Definition) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Guards of axes, and the constraints that are none."""
    found: dict[str, dict[str, int]] = {}
    unread = []
    for constraint in definition.constraints:
        match = re.fullmatch(r"(\w+) (% (\d+) ==|<=|>=) (\d+)", constraint.strip())
        axis = match[1] if match else ""
        if match is None or axis not in definition.axes or (match[3] and match[4] != "0"):
            unread.append(constraint)
            continue
        kind = {"<=": "maximum", ">=": "minimum"}.get(match[2], "multiple_of")
        if kind in found.setdefault(axis, {}):
            unread.append(constraint)
        else:
            found[axis][kind] = int(match[3] or match[4])
    return found, unread


def _tensor(
    name: str, dtype: str, shape: tuple[str, ...], access: str, summary: str | None
) -> dict[str, object]:
    told: dict[str, object] = {"name": name, "dtype": dtype, "shape": list(shape), "access": access}
    return told | {"summary": summary or ""}


def _scalar(
    name: str, dtype: str, workloads: list[ForeignWorkload], summary: str
) -> dict[str, object]:
    if dtype not in (*FLOATS, *INTEGERS):
        raise Refused(f"scalar {name} is {dtype}, which a contract cannot say")
    told = [each.inputs[name].value for each in workloads if name in each.inputs]
    values = {float(value) for value in told if value is not None}
    if len(values) != 1:
        said = "no workload says" if not values else "the workloads differ in"
        raise Refused(f"{said} the value of scalar {name}")
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
    """Each tensor once; a dtype's symbol is its item size."""
    products = []
    for tensor in tensors:
        shape = tensor["shape"]
        assert isinstance(shape, list)
        products.append(" * ".join([*shape, str(tensor["dtype"])]))
    return " + ".join(products)
