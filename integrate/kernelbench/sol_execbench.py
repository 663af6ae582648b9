"""A problem of SOL-ExecBench as a file of KernelBench's form, so that it is traced as such a one.

A problem is a folder with `definition.json` and `workload.jsonl`; the fields are those of its
documents (github.com/NVIDIA/SOL-ExecBench, `docs/definition.md` and `docs/workload.md`). Its
reference is a stranger's code, which runs in the sandbox alone, at the sizes of the smallest
workload. Dtypes stay as they are: an op of it has no columns of precision.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from patcher.bench import DTYPES, arithmetic_value, names_in, parse_json, problem
from patcher.integrate.formats.foreign_contract import FLOATS, Refused
from patcher.integrate.kernelbench.problem import SMALLEST, Problem, plain
from patcher.integrate.kernelbench.sol_file import free_axes, sol_file
from patcher.integrate.kernelbench.sol_records import SolDefinition, SolWorkload

SOL = "SOL-ExecBench"
DEFINITION, WORKLOADS = "definition.json", "workload.jsonl"
MOST_BYTES = 8 << 20
"""Of a problem's files."""


def sol_problems(path: Path) -> list[Path]:
    """The Definitions of SOL-ExecBench at a path: of a file, a problem's folder, or those below."""
    if path.is_file():
        found = [path] if path.name == DEFINITION else []
    else:
        found = sorted(path.rglob(DEFINITION))
    return [each for each in found if each.is_file() and (each.parent / WORKLOADS).is_file()]


def is_sol(path: Path) -> bool:
    """Whether a file that an import found is a Definition of SOL-ExecBench."""
    return path.name == DEFINITION


def sol_size_names(path: Path) -> list[str]:
    """The axes whose sizes workloads choose; none of a damaged Definition."""
    try:
        axes = definition_at(path).axes
    except Refused:
        return []
    return [name for name, axis in axes.items() if axis.type == "var"]


def read_sol_problem(path: Path, scale: int, sizes: Mapping[str, int]) -> Problem:
    """Read a problem as one of KernelBench's form.

    Args:
        path: its `definition.json`; `workload.jsonl` is beside it.
        scale: divides each variable size that stays at least `SMALLEST`.
        sizes: other sizes of variable axes, for all workloads.

    Raises:
        Refused: it is damaged, or an op cannot have its inputs.
    """
    definition = definition_at(path)
    workloads = _workloads(path.parent / WORKLOADS)
    _check(definition, workloads)
    changed: dict[str, str] = {}
    every = [_changed(each.axes, scale, sizes, changed) for each in workloads]
    free = free_axes(definition)
    # what is traced with a size of 1 has no other
    traced = {
        name: max(size, 2) if any(each[name] > 1 for each in every) else size
        for name, size in min(every, key=lambda each: math.prod(each.values())).items()
    }
    return Problem(
        name=_name(definition.name),
        file=shown_name(definition),
        source=sol_file(definition, workloads[0], _all_sizes(definition, traced), free),
        changed=changed,
        origin=SOL,
        axes={
            name: tuple(free.get(axis, "") for axis in tensor.shape)
            for name, tensor in definition.inputs.items()
            if tensor.shape is not None
        },
        outputs={name: each.dtype for name, each in definition.outputs.items()},
        shapes={
            name: tensor.shape
            for name, tensor in (*definition.inputs.items(), *definition.outputs.items())
            if tensor.shape is not None
        },
        workloads=tuple(_all_sizes(definition, each) for each in every),
    )


def shown_name(definition: SolDefinition) -> str:
    """Its name as generated texts hold it."""
    return plain(definition.name)[:100].replace('"', "'")


def definition_at(path: Path) -> SolDefinition:
    """The Definition in a file.

    Raises:
        Refused: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return SolDefinition.model_validate(parse_json(_content(path)))
    except (ValidationError, ValueError) as error:
        raise Refused(f"its {DEFINITION} is damaged: {problem(error):.200}") from error


def _workloads(path: Path) -> list[SolWorkload]:
    lines = [line for line in _content(path).splitlines() if line.strip()]
    try:
        found = [SolWorkload.model_validate(parse_json(line)) for line in lines]
    except (ValidationError, ValueError) as error:
        raise Refused(f"its {WORKLOADS} is damaged: {problem(error):.200}") from error
    if not found:
        raise Refused(f"its {WORKLOADS} has no workload")
    return found


def _content(path: Path) -> bytes:
    if path.stat().st_size > MOST_BYTES:
        raise Refused(f"its {path.name} is larger than {MOST_BYTES >> 20} MiB")
    return path.read_bytes()


def _name(text: str) -> str:
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_").lower()[:80]
    return name if name[:1].isalpha() else f"problem_{name}"


def _check(definition: SolDefinition, workloads: Iterable[SolWorkload]) -> None:
    """Refuse what an op cannot have, in the order in which a person would see it."""
    names = [*definition.inputs, *definition.outputs, *definition.axes]
    if definition.custom_inputs_entrypoint:
        names.append(definition.custom_inputs_entrypoint)
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
            raise Refused(f"{plain(name)!r} cannot be a name in Python and C++")
    for name, axis in definition.axes.items():
        if name in ("min", "max", "pow", *DTYPES):
            raise Refused(f"its axis {name} has the name of a function or a dtype")
        if axis.type == "const" and axis.value is None:
            raise Refused(f"its axis {name} is constant and has no value")
        try:
            names_in(axis.expression or "0")
        except (SyntaxError, ValueError, RecursionError) as error:
            raise Refused(f"the size of {name} cannot be computed") from error
    try:
        tree = ast.parse(definition.reference)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Refused(f"its reference is no Python: {plain(str(error))}") from error
    if "run" not in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}:
        raise Refused("its reference has no function run")
    tensors = {name: each for name, each in definition.inputs.items() if each.shape is not None}
    for name, tensor in {**tensors, **definition.outputs}.items():
        if tensor.shape is None or tensor.dtype not in FLOATS:
            kind = "a number" if tensor.shape is None else plain(tensor.dtype)
            raise Refused(f"{name} is {kind}: an op of this import has {', '.join(FLOATS)}")
        known = definition.axes
        if unknown := [each for each in tensor.shape if each not in known and not _digits(each)]:
            raise Refused(f"{name} has an axis {plain(unknown[0])}, which is not defined")
    if not tensors:
        raise Refused("it reads no tensor")
    _check_parameters(tree, list(definition.inputs))
    numbers = [name for name, each in definition.inputs.items() if each.shape is None]
    for workload in workloads:
        if missing := [name for name in definition.inputs if name not in workload.inputs]:
            raise Refused(f"a workload does not say what {missing[0]} is")
        for name, given in workload.inputs.items():
            if given.type == "safetensors":
                raise Refused(f"its workloads have {plain(name)} in a file")
            if given.type == "custom" and not definition.custom_inputs_entrypoint:
                raise Refused(f"nothing makes its custom input {plain(name)}")
            if name in numbers and (given.type != "scalar" or given.value is None):
                raise Refused(f"a workload has no value of {name}")
    for name in definition.inputs:
        if len({each.inputs[name].type for each in workloads}) > 1:
            raise Refused(f"its workloads differ in what makes {name}, and an op has one way")
    for name in numbers:
        if len({each.inputs[name].value for each in workloads}) > 1:
            raise Refused(f"its workloads differ in {name}, and an op has one value of it")


def _changed(
    axes: Mapping[str, int], scale: int, sizes: Mapping[str, int], changed: dict[str, str]
) -> dict[str, int]:
    made = {}
    for name, size in axes.items():
        smaller = size // scale if size // scale >= SMALLEST else size
        made[name] = sizes.get(name, smaller)
        if made[name] != size:
            changed.setdefault(name, f"{size} -> {made[name]}")
    return made


def _all_sizes(definition: SolDefinition, free: Mapping[str, int]) -> dict[str, int]:
    """The size of each axis in one workload."""
    sizes: dict[str, int] = {}
    for name, axis in definition.axes.items():
        if axis.type == "const" and axis.value is not None:
            sizes[name] = axis.value
        elif axis.type == "var" and name in free:
            sizes[name] = free[name]
    for name, axis in definition.axes.items():
        if axis.type == "expr":
            try:
                known = {each: sizes[each] for each in names_in(axis.expression or "")}
                size = arithmetic_value(axis.expression or "", known)
                if size != int(size):
                    raise Refused(f"the size of {name} is {size:g} in a workload")
                sizes[name] = int(size)
            except (SyntaxError, ValueError, ArithmeticError, RecursionError, KeyError) as error:
                raise Refused(f"the size of {name} cannot be computed") from error
    if missing := definition.axes.keys() - sizes.keys():
        raise Refused(f"its workloads say no size of {min(missing)}")
    return sizes


def _digits(axis: str) -> bool:
    """Whether a shape has a number in place of an axis."""
    return axis.isascii() and axis.isdecimal() and len(axis) < 12


def _check_parameters(tree: ast.Module, inputs: list[str]) -> None:
    """Inputs are handed over by their place, so that an order of `run`'s own would mix them up."""
    run = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "run"]
    told = run[-1].args
    names = [each.arg for each in (*told.posonlyargs, *told.args)]
    if names[: len(inputs)] != inputs and not told.vararg:
        raise Refused(
            f"run takes {plain(', '.join(names)[:150])}, and its inputs are "
            f"{plain(', '.join(inputs)[:150])}"
        )
