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
from typing import Any, Literal

from pydantic import Field, ValidationError

from patcher.bench import Record, arithmetic_value, names_in, parse_json, problem
from patcher.integrate.formats.foreign_contract import FLOATS, Refused
from patcher.integrate.kernelbench.problem import SMALLEST, Problem, plain

SOL = "SOL-ExecBench"
DEFINITION, WORKLOADS = "definition.json", "workload.jsonl"
MOST_BYTES = 8 << 20
"""Of a problem's files."""
_FILE = """{reference}


class Model(__import__("torch").nn.Module):
    def forward(self, {tensors}):
        return run({arguments})


def get_inputs():
    import torch

    torch.set_default_device("cpu")
    {made}


def get_init_inputs():
    return []


FREE_AXES = {free!r}


def _finite():
    import torch

    made = run({called})
    for each in made if isinstance(made, (tuple, list)) else (made,):
        if each.is_floating_point() and bool(torch.isnan(each).any()):
            raise ValueError("inputs that are drawn at random make its result NaN")


_finite()
"""


class SolAxis(Record):
    type: Literal["const", "var", "expr"]
    value: int | None = Field(None, ge=0, le=1 << 40)
    expression: str | None = Field(None, max_length=300)
    description: str | None = None


class SolTensor(Record):
    shape: tuple[str, ...] | None
    """None: a number of Python."""
    dtype: str
    description: str | None = None


class SolDefinition(Record):
    name: str = Field(min_length=1, max_length=300)
    axes: dict[str, SolAxis]
    inputs: dict[str, SolTensor]
    outputs: dict[str, SolTensor]
    reference: str
    op_type: str | None = None
    description: str | None = None
    hf_id: str | None = None
    custom_inputs_entrypoint: str | None = None
    constraints: tuple[str, ...] | None = None


class SolInput(Record):
    type: Literal["random", "scalar", "safetensors", "custom"]
    value: bool | int | float | None = None
    path: str | None = None
    tensor_key: str | None = None


class SolWorkload(Record):
    uuid: str
    axes: dict[str, int]
    inputs: dict[str, SolInput]
    tolerance: dict[str, Any] | None = None


def sol_problems(path: Path) -> list[Path]:
    """The Definitions of SOL-ExecBench at a path: of a file, a problem's folder, or those below."""
    if path.is_file():
        found = [path] if path.name == DEFINITION else []
    else:
        found = sorted(path.rglob(DEFINITION))
    return [each for each in found if (each.parent / WORKLOADS).is_file()]


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
    free = _free(definition)
    # what is traced with a size of 1 has no other
    traced = {
        name: max(size, 2) if any(each[name] > 1 for each in every) else size
        for name, size in min(every, key=lambda each: math.prod(each.values())).items()
    }
    return Problem(
        name=_name(definition.name),
        file=shown_name(definition),
        source=_file(definition, workloads[0], _all_sizes(definition, traced)),
        changed=changed,
        origin=SOL,
        axes={
            name: tuple(axis if axis in free else "" for axis in tensor.shape)
            for name, tensor in definition.inputs.items()
            if tensor.shape is not None
        },
        outputs=tuple(definition.outputs),
        workloads=tuple(
            {name: size for name, size in _all_sizes(definition, each).items() if name in free}
            for each in every
        ),
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
        if unknown := [axis for axis in tensor.shape if axis not in definition.axes]:
            raise Refused(f"{name} has an axis {plain(unknown[0])}, which is not defined")
    if not tensors:
        raise Refused("it reads no tensor")
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
                sizes[name] = int(arithmetic_value(axis.expression or "", known))
            except (SyntaxError, ValueError, ArithmeticError, RecursionError, KeyError) as error:
                raise Refused(f"the size of {name} cannot be computed") from error
    if missing := definition.axes.keys() - sizes.keys():
        raise Refused(f"its workloads say no size of {min(missing)}")
    return sizes


def _free(definition: SolDefinition) -> set[str]:
    """The axes whose sizes differ between workloads, those that are computed of such among them."""
    free = {name for name, axis in definition.axes.items() if axis.type == "var"}
    free |= {
        name
        for name, axis in definition.axes.items()
        if axis.type == "expr" and names_in(axis.expression or "") & free
    }
    return free


def _file(definition: SolDefinition, workload: SolWorkload, sizes: Mapping[str, int]) -> str:
    tensors = [name for name, each in definition.inputs.items() if each.shape is not None]
    numbers = {
        name: repr(workload.inputs[name].value)
        for name, each in definition.inputs.items()
        if each.shape is None
    }
    made = []
    for name in tensors:
        spec, given = definition.inputs[name], workload.inputs[name]
        shape = tuple(sizes[axis] for axis in spec.shape or ())
        drawn = f"torch.randn({shape}).to(torch.{spec.dtype})"
        made.append(f"made[{name!r}].to(torch.{spec.dtype})" if given.type == "custom" else drawn)
    lines = []
    if definition.custom_inputs_entrypoint:
        known = {**sizes, **{name: each.value for name, each in workload.inputs.items()}}
        told = {name: value for name, value in known.items() if value is not None}
        entry = definition.custom_inputs_entrypoint
        lines.append(f'made = {entry}({told!r}, torch.device("cpu"))')
    lines.append(f"return [{', '.join(made)}]")
    index = iter(range(len(tensors)))
    called = [numbers.get(name) or f"get_inputs()[{next(index)}]" for name in definition.inputs]
    free = _free(definition)
    axes = {
        name: [
            index for index, axis in enumerate(definition.inputs[name].shape or ()) if axis in free
        ]
        for name in tensors
    }
    return _FILE.format(
        free=axes,
        reference=definition.reference,
        tensors=", ".join(tensors),
        arguments=", ".join(numbers.get(name, name) for name in definition.inputs),
        made="\n    ".join(lines),
        called=", ".join(called),
    )
