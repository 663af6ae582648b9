"""The contract of a traced problem, in one of the columns of precision that are never mixed."""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patcher.bench import DTYPES, Contract, Record, names_in
from patcher.integrate.formats.foreign_contract import FLOATS, Refused
from patcher.integrate.kernelbench.axes import axis_limits, op_axes, op_shape, over_axes
from patcher.integrate.kernelbench.columns import PrecisionColumn
from patcher.integrate.kernelbench.names import identifier
from patcher.integrate.kernelbench.problem import Problem, ProblemTrace, TracedTensor, plain
from patcher.integrate.kernelbench.workloads import MOST_CHECKED, chosen, fits, tied

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
        zero |= {"triu1": f"{zero['triu']} and on it", "tril1": f"{zero['tril']} and on it"}
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
    own_outputs = _own_outputs(problem, trace)
    axes, fixed_axis, own_axes = op_axes(problem, trace, names, taken)
    read = [
        NamedTensor(
            name=names[each.node],
            kind=each.kind,
            target=each.target,
            dtype=_supported(each.dtype, names[each.node], precision),
            shape=op_shape(each.shape, axes, fixed_axis if index == 0 else "") or ("1",),
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
        own = own_outputs[index] if own_outputs else ""
        usual = "output" if len(trace.outputs) == 1 else f"output_{index}"
        name = identifier(own or usual, taken)
        tensors.append(
            {
                "name": name,
                "dtype": _supported(output.dtype, name, precision),
                "shape": op_shape(output.shape, axes, "") or ("1",),
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
        size = int(over_axes(trace.tensors[0].shape[0], axes))
        sizes, limits = {alone: size}, {alone: {"minimum": size, "maximum": size}}
        hidden, values, swept = [], [size], alone
    else:
        now = tied({name: symbol.size for name, symbol in trace.symbols.items()}, axes)
        if now is None:
            raise Refused("its trace has sizes of one axis that differ")
        sizes = now
        limits = axis_limits(trace, axes)
        found = [tied(each, axes) for each in trace.sizes if each.keys() == axes.keys()]
        hidden = [{"axes": each} for each in found if each is not None]
        swept = next(iter(sizes))
        least = max(
            limits[swept]["minimum"], min(h["axes"][swept] for h in hidden or [{"axes": sizes}])
        )
        step = limits[swept]["multiple_of"]
        values = sorted({sizes[swept] // each for each in POINTS if sizes[swept] // each >= least})
        values = [each for each in values if each % step == 0] or [sizes[swept]]
    if not alone and problem.workloads:
        shapes = [(problem.shapes[name], shape) for name, shape in _shapes(problem, trace, axes)]
        fit = [each for each in problem.workloads if fits(each, own_axes, shapes)]
        given = chosen(fit, own_axes, sizes, limits)
        if given is None:
            raise Refused(
                "its graph takes the sizes of no workload, or gives other sizes than it says"
            )
        if len(fit) < len(problem.workloads):
            notes.append(
                f"{len(problem.workloads) - len(fit)} of {len(problem.workloads)} workloads are "
                "not judged: the reference at the smallest one's sizes is no graph of theirs"
            )
        if computed := set().union(*(names_in(each) for each in axes.values() if "(" in each)):
            for axis in computed:  # what is computed of a smaller one may be none
                judged = [*given.values] if axis == given.axis else [given.fixed[axis]]
                judged += [each["axes"][axis] for each in hidden] + [c[axis] for c in given.checked]
                limits[axis]["minimum"] = max(limits[axis]["minimum"], min(judged))
        swept, values = given.axis, list(given.values)
        sizes = {**given.fixed, swept: values[-1]}
        hidden += [{"axes": each} for each in given.checked if {"axes": each} not in hidden]
        if given.unjudged:
            notes.append(_unjudged(given.unjudged, len(fit)))
    fixed = {axis: size for axis, size in sizes.items() if axis != swept}
    dtypes = list(dict.fromkeys(str(each["dtype"]) for each in tensors))
    point = {"dtypes": {each: each for each in dtypes}, "axis": swept, "values": values}
    devices = ("cuda",) if precision.tf32 else ("cpu", "cuda")
    sums = sorted({over_axes(each, axes) for each in trace.sums})
    flops = [over_axes(each, axes) for each in trace.flops]
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


def _own_outputs(problem: Problem, trace: ProblemTrace) -> list[str]:
    """The problem's own names of its results, which are of the dtypes that it says."""
    if not problem.outputs:
        return []
    if len(problem.outputs) != len(trace.outputs):
        raise Refused(f"it has {len(problem.outputs)} outputs and gives {len(trace.outputs)}")
    for (name, dtype), output in zip(problem.outputs.items(), trace.outputs, strict=True):
        if output.dtype != dtype:
            raise Refused(f"{name} is {dtype}, and its reference gives {plain(output.dtype)[:20]}")
    return list(problem.outputs)


def _shapes(
    problem: Problem, trace: ProblemTrace, axes: dict[str, str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each input and result by its own name, with its sizes over the op's axes."""
    for each in trace.tensors:
        if each.kind == "input" and each.name in problem.shapes:
            yield each.name, op_shape(each.shape, axes, "")
    for name, output in zip(problem.outputs, trace.outputs, strict=True):
        yield name, op_shape(output.shape, axes, "")


def _unjudged(count: int, every: int) -> str:
    return (
        f"{count} of {every} workloads are not judged: {MOST_CHECKED} are checked besides the "
        "timed ones, of sizes that the graph takes"
    )


def _bytes(tensors: list[dict[str, Any]]) -> str:
    return " + ".join(" * ".join([*each["shape"], each["dtype"]]) for each in tensors)
