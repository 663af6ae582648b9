"""The contract of a traced problem, in one of the columns of precision that are never mixed."""

from __future__ import annotations

import base64
import binascii
import math
import re
import zlib
from dataclasses import dataclass
from typing import Any

from patcher.bench import DTYPES, Contract, Record, arithmetic_value, names_in
from patcher.integrate.formats.foreign_contract import FLOATS, Refused
from patcher.integrate.kernelbench.columns import PrecisionColumn
from patcher.integrate.kernelbench.names import identifier
from patcher.integrate.kernelbench.problem import Problem, ProblemTrace, TracedTensor, plain
from patcher.integrate.kernelbench.workloads import MOST_CHECKED, chosen

POINTS = (4, 2, 1)
"""The sweep times the file's size of the swept axis divided by each of these."""


class NamedTensor(Record):
    """A tensor of the op and where it comes from."""

    name: str
    kind: str
    """`input`, `parameter`, `buffer` or `constant`."""
    target: str
    """Name in the module, or of the argument of `forward`."""
    dtype: str
    shape: tuple[str, ...]
    drawn: str
    low: float
    high: float
    table: str = ""
    triangle: str = ""

    @property
    def given(self) -> bool:
        """Whether only the op's inputs.py chooses its values."""
        return self.dtype not in FLOATS or self.drawn == "table" or self.triangle != ""

    @property
    def summary(self) -> str:
        zero = {"triu": ", zero below its diagonal", "tril": ", zero above its diagonal"}
        return f"{self.kind} {self.target}{zero.get(self.triangle, '')}"


@dataclass(frozen=True)
class TracedOp:
    contract: Contract
    tensors: list[NamedTensor]
    """Those that are read, in the contract's order."""
    nodes: dict[str, str]
    """How Python reads the tensors, by the graph's names."""
    arguments: list[dict[str, Any]]
    notes: list[str]


def op_of(problem: Problem, trace: ProblemTrace, precision: PrecisionColumn) -> TracedOp:
    """Build the op of a trace.

    Raises:
        Refused: a contract cannot express it.
    """
    # an op's inputs come first, its weights after them
    ordered = tuple(sorted(trace.tensors, key=lambda each: each.kind != "input"))
    trace = trace.model_copy(update={"tensors": ordered})
    taken = {problem.name + precision.suffix}
    names = {each.node: identifier(each.name, taken) for each in trace.tensors}
    axes, fixed_axis, own_axes = _axes(problem, trace, names, taken)
    read = [
        NamedTensor(
            name=names[each.node],
            kind=each.kind,
            target=each.target,
            dtype=_supported(each.dtype, names[each.node], precision),
            shape=_shape(each.shape, axes, fixed_axis if index == 0 else "") or ("1",),
            drawn=each.drawn,
            low=each.low,
            high=each.high,
            table=_table(each),
            triangle=each.triangle,
        )
        for index, each in enumerate(trace.tensors)
    ]
    if not read or trace.tensors[0].kind != "input":
        raise Refused("its forward takes no tensor")
    tensors: list[dict[str, Any]] = [
        {
            "name": each.name,
            "dtype": each.dtype,
            "shape": each.shape,
            "access": "read",
            "values": "given" if each.given else "any",
            "constant": each.kind != "input",
            "summary": each.summary,
        }
        for each in read
    ]
    for index, output in enumerate(trace.outputs):
        own = problem.outputs[index] if len(problem.outputs) == len(trace.outputs) else ""
        usual = "output" if len(trace.outputs) == 1 else f"output_{index}"
        name = identifier(own or usual, taken)
        tensors.append(
            {
                "name": name,
                "dtype": _supported(output.dtype, name, precision),
                "shape": _shape(output.shape, axes, "") or ("1",),
                "access": "write",
                "summary": f"result {index} of forward",
            }
        )
    if precision.suffix and all(each.dtype != "float32" for each in trace.outputs):
        raise Refused("its result holds integers, which have no tolerance: import it as fp32")
    notes = [plain(each) for each in trace.notes]
    contract = _contract(problem, trace, precision, tensors, axes, fixed_axis, own_axes, notes)
    arguments = [
        {"tensor": names[_node(trace, each["tensor"])]} if "tensor" in each else each
        for each in trace.arguments
    ]
    if problem.changed:
        notes.append(f"sizes differ from the file's: {_changes(problem)}")
    if not trace.sizes:
        notes.append("only the file's own sizes are judged: the graph holds at no others")
    # a contract's tensors have an axis; the graph reads a number as the module has it
    nodes = {
        each.node: names[each.node] if each.shape else f"{names[each.node]}.reshape(())"
        for each in trace.tensors
    }
    return TracedOp(contract, read, nodes, arguments, notes)


def _node(trace: ProblemTrace, name: object) -> str:
    for each in trace.tensors:
        if each.kind == "input" and each.target == name:
            return each.node
    raise Refused("its trace names an argument that it does not describe")


def _changes(problem: Problem) -> str:
    return ", ".join(f"{name}: {change}" for name, change in problem.changed.items())


def _supported(dtype: str, name: str, precision: PrecisionColumn) -> str:
    if dtype not in precision.supported:
        known = ", ".join(precision.supported)
        raise Refused(f"{name} is {dtype[:20]}; an op of this import has {known}")
    return dtype


def _axes(
    problem: Problem, trace: ProblemTrace, names: dict[str, str], taken: set[str]
) -> tuple[dict[str, str], str, dict[str, str]]:
    """The axis of each symbol; without any, an axis that has one size. And the problem's own names
    of axes, by the op's."""
    axes: dict[str, str] = {}
    own_axes: dict[str, str] = {}
    for each in trace.tensors:
        for index, size in enumerate(each.shape):
            if size in trace.symbols and size not in axes and trace.sizes:
                own = dict(enumerate(problem.axes.get(each.name, ()))).get(index)
                axes[size] = identifier(own or f"{names[each.node]}_{index}", taken)
                if own:
                    own_axes[axes[size]] = own
    if axes and set(axes) != set(trace.symbols):
        raise Refused("its sizes depend on one that no input has")
    if axes:
        return axes, "", own_axes
    first = trace.tensors[0] if trace.tensors else None
    if first is None or not first.shape:
        raise Refused("its first input has no axes")
    alone = identifier(f"{names[first.node]}_0", taken)
    # every symbol becomes its size
    return {name: str(symbol.size) for name, symbol in trace.symbols.items()}, alone, {}


def _shape(sizes: tuple[str, ...], axes: dict[str, str], alone: str) -> tuple[str, ...]:
    """Sizes over axes, folded to a number where nothing is free."""
    shape = [_renamed(size, axes) for size in sizes]
    return (alone, *shape[1:]) if alone else tuple(shape)


def _renamed(text: str, axes: dict[str, str]) -> str:
    expression = re.sub(r"[A-Za-z_]\w*", lambda match: axes.get(match[0], match[0]), text)
    try:
        names = names_in(expression)
        if names - set(axes.values()):
            raise Refused("its trace names a size that it does not define")
        value = arithmetic_value(expression, dict.fromkeys(names, 64))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        raise Refused("its trace has a size that is no arithmetic") from error
    if not names:
        return str(int(value))
    return expression


def _table(tensor: TracedTensor) -> str:
    if tensor.drawn != "table":
        return ""
    if any(not size.isdecimal() for size in tensor.shape) or tensor.dtype not in DTYPES:
        raise Refused(f"{tensor.name[:40]} is a table of another form")
    size = math.prod(map(int, tensor.shape)) * DTYPES[tensor.dtype].item_bytes
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(tensor.table), size + 1)
    except (zlib.error, binascii.Error) as error:
        raise Refused("its trace has a damaged table") from error
    if len(unpacked) != size:
        raise Refused("its trace has a table of another size")
    return tensor.table


def _contract(
    problem: Problem,
    trace: ProblemTrace,
    precision: PrecisionColumn,
    tensors: list[dict[str, Any]],
    axes: dict[str, str],
    alone: str,
    own_axes: dict[str, str],
    notes: list[str],
) -> Contract:
    if alone:
        size = int(_renamed(trace.tensors[0].shape[0], axes))
        sizes, limits = {alone: size}, {alone: {"minimum": size, "maximum": size}}
        hidden, values, swept = [], [size], alone
    else:
        sizes = {axis: trace.symbols[symbol].size for symbol, axis in axes.items()}
        limits = {
            axis: {"minimum": (free := trace.symbols[symbol]).least, "multiple_of": free.multiple}
            | ({"maximum": free.most} if free.most else {})
            for symbol, axis in axes.items()
        }
        hidden = [
            {"axes": {axes[symbol]: size for symbol, size in each.items()}}
            for each in trace.sizes
            if each.keys() == axes.keys()
        ]
        swept = next(iter(sizes))
        least = max(
            limits[swept]["minimum"], min(h["axes"][swept] for h in hidden or [{"axes": sizes}])
        )
        step = limits[swept]["multiple_of"]
        values = sorted({sizes[swept] // each for each in POINTS if sizes[swept] // each >= least})
        values = [each for each in values if each % step == 0] or [sizes[swept]]
    if not alone and problem.workloads:
        least_of = {axis: limit["minimum"] for axis, limit in limits.items()}
        given = chosen(problem.workloads, own_axes, sizes, least_of)
        if given is None:
            raise Refused("its graph takes the sizes of no workload")
        swept, values = given.axis, list(given.values)
        sizes = {**given.fixed, swept: values[-1]}
        hidden += [{"axes": each} for each in given.checked if {"axes": each} not in hidden]
        if given.unjudged:
            notes.append(_unjudged(given.unjudged, len(problem.workloads)))
    fixed = {axis: size for axis, size in sizes.items() if axis != swept}
    dtypes = list(dict.fromkeys(str(each["dtype"]) for each in tensors))
    point = {"dtypes": {each: each for each in dtypes}, "axis": swept, "values": values}
    devices = ("cuda",) if precision.tf32 else ("cpu", "cuda")
    sums = sorted({_renamed(each, axes) for each in trace.sums})
    flops = [_renamed(each, axes) for each in trace.flops]
    sized = f" Sizes differ from the file's: {_changes(problem)}." if problem.changed else ""
    return Contract.model_validate(
        {
            "schema_version": 1,
            "name": problem.name + precision.suffix,
            "operation": "kernelbench",
            "summary": f"The module of {problem.origin}'s {problem.file}. "
            f"Precision: {precision.said}.{sized}",
            "source": f"{problem.origin}, {problem.file}",
            "dtypes": {each: [each] for each in dtypes},
            "tensors": tensors,
            "sweeps": [{"name": each, "device": each, "fixed": fixed, **point} for each in devices],
            "hidden": hidden,
            "guards": {"axes": limits},
            "accuracy": {"reduction": f"max({', '.join(sums)})" if sums else "1"},
            "cost": {
                "bytes": _bytes(tensors),
                "flops": " + ".join(flops) or "0",
                "rewritable": True,  # a sum over a product's columns needs no product
            },
        }
    )


def _unjudged(count: int, every: int) -> str:
    return (
        f"{count} of {every} workloads are not judged: {MOST_CHECKED} are checked besides the "
        "timed ones, of sizes that the graph takes"
    )


def _bytes(tensors: list[dict[str, Any]]) -> str:
    return " + ".join(" * ".join([*each["shape"], each["dtype"]]) for each in tensors)
