"""The file of KernelBench's form that stands for a problem of SOL-ExecBench."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from patcher.bench import names_in
from patcher.integrate.kernelbench.names import replaced
from patcher.integrate.kernelbench.sol_records import SolDefinition, SolWorkload

_FILE = """import sys as _sys

_sys.modules["problem"] = type(_sys)("problem")
_own = vars(_sys.modules["problem"])
exec(compile({reference!r}, "reference.py", "exec", dont_inherit=True), _own)


def _run(*_given):
    made = _own["run"](*_given)
    return tuple(made[name] for name in {outputs!r}) if isinstance(made, dict) else made


class Model(__import__("torch").nn.Module):
    def forward(_self, {tensors}):
        return _run({arguments})


def get_inputs():
    import torch

    torch.set_default_device("cpu")
    {made}


def get_init_inputs():
    return []


FREE_AXES = {free!r}


def _finite():
    import torch

    made = _run({called})
    for each in made if isinstance(made, (tuple, list)) else (made,):
        if each.is_floating_point() and bool(torch.isnan(each).any()):
            raise ValueError("inputs that are drawn at random make its result NaN")


_finite()
"""


def free_axes(definition: SolDefinition) -> dict[str, str]:
    """The axes whose sizes differ between workloads, and what each is: its own name, or sums,
    products and quotients of those of other inputs."""
    free = {name: name for name, axis in definition.axes.items() if axis.type == "var"}
    read = {axis for each in definition.inputs.values() for axis in each.shape or ()}
    numbers = {name: str(axis.value) for name, axis in definition.axes.items() if axis.value}
    for name, axis in definition.axes.items():
        text = axis.expression or ""
        if axis.type != "expr":
            continue
        if names_in(text) & free.keys():
            known = {**numbers, **{each: f"({free[each]})" for each in free}}
            whole = replaced(text, known)
            same = re.fullmatch(r"(?:[\w ()+*]|//)+", whole) and "**" not in whole
            free[name] = whole if same and names_in(whole) <= read and len(whole) < 200 else name
        else:
            numbers[name] = f"({text})"
    return free


def _sizes_of(shape: Iterable[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[each] if each in sizes else int(each) for each in shape)


def sol_file(
    definition: SolDefinition,
    workload: SolWorkload,
    sizes: Mapping[str, int],
    free: Mapping[str, str],
) -> str:
    """The text of the file: it runs the Definition's reference in a module of its own.

    Args:
        workload: says how inputs are made, and numbers.
        sizes: of each axis.
        free: see `free_axes`.
    """
    tensors = [name for name, each in definition.inputs.items() if each.shape is not None]
    numbers = {
        name: repr(workload.inputs[name].value)
        for name, each in definition.inputs.items()
        if each.shape is None
    }
    made = []
    for name in tensors:
        spec, given = definition.inputs[name], workload.inputs[name]
        shape = _sizes_of(spec.shape or (), sizes)
        drawn = f"torch.randn({shape}).to(torch.{spec.dtype})"
        made.append(f"made[{name!r}].to(torch.{spec.dtype})" if given.type == "custom" else drawn)
    lines = []
    if definition.custom_inputs_entrypoint:
        known = {**sizes, **{name: each.value for name, each in workload.inputs.items()}}
        told = {name: value for name, value in known.items() if value is not None}
        entry = definition.custom_inputs_entrypoint
        lines.append(f'made = _own[{entry!r}]({told!r}, torch.device("cpu"))')
    lines.append(f"return [{', '.join(made)}]")
    index = iter(range(len(tensors)))
    called = [numbers.get(name) or f"get_inputs()[{next(index)}]" for name in definition.inputs]
    axes = {
        name: {
            index: free[axis]
            for index, axis in enumerate(definition.inputs[name].shape or ())
            if axis in free
        }
        for name in tensors
    }
    return _FILE.format(
        free=axes,
        reference=definition.reference,
        outputs=tuple(definition.outputs),
        tensors=", ".join(tensors),
        arguments=", ".join(numbers.get(name, name) for name in definition.inputs),
        made="\n    ".join(lines),
        called=", ".join(called),
    )
