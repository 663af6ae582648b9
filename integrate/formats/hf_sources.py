"""Generate the Python of an exported kernel repository: op with guards, layer, and page.

The code must be self-contained: processes without patcher load it under another name, with Python
3.9 and later. It may import only torch and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

from patcher.bench import Contract, Evaluation, Language, TensorSpec
from patcher.integrate.formats import Files


@dataclass(frozen=True)
class Package:
    """The Python package: `__init__.py`, `_op.py` and, if there can be a layer, `layers.py`."""

    files: Files
    layer: str | None
    """Name of the layer; None if there is none."""


def package(contract: Contract, device: str, language: Language) -> Package:
    """The package around `kernel.py` (PyTorch, Triton) or `_ops.py` (C++, CUDA)."""
    entry = contract.name
    python = language.in_python
    load = f"from .kernel import {entry} as _kernel" if python else "from ._ops import ops"
    bind = "" if python else f"\n_kernel = ops.{entry}\n"
    tensors = {each.name: [each.dtype, list(each.shape)] for each in contract.tensors}
    names = [each.name for each in contract.tensors] + [each.name for each in contract.scalars]
    written = [each.name for each in contract.written]
    op = OP.format(
        signature=contract.signature(),
        load=load,
        bind=bind,
        tensors=tensors,
        dtypes=contract.dtype_choices(),
        layouts={each.name: each.layout for each in contract.tensors},
        alignments={each.name: each.alignment for each in contract.tensors},
        sizes={
            axis: (guard.minimum, guard.maximum, guard.multiple_of)
            for axis, guard in contract.guards.axes.items()
        },
        device=device,
        entry=entry,
        written=tuple(written),
        schema=_schema(contract),
        names=", ".join(names),
        pairs=", ".join(f"{each.name}={each.name}" for each in contract.tensors),
    )
    files = {"_op.py": op.encode()}
    layer = _layer(contract)
    exported = [f"from ._op import {entry}"]
    if layer is not None:
        files["layers.py"] = layer.encode()
        exported.insert(0, "from . import layers")
    public = [entry, *(["layers"] if layer is not None else [])]
    init = f'"""{contract.signature()}: see README.md."""\n\n'
    init += "\n".join(exported) + f"\n\n__all__ = {public!r}\n"
    files["__init__.py"] = init.encode()
    return Package(files=files, layer=layer_name(contract) if layer is not None else None)


def layer_name(contract: Contract) -> str:
    """The layer's class name: the op's name in camel case."""
    return "".join(part.capitalize() for part in contract.name.split("_"))


def _schema(contract: Contract) -> str:
    """The op's schema in PyTorch's language; `!` marks written tensors."""
    parts = []
    for index, tensor in enumerate(contract.tensors):
        mark = "" if tensor.access == "read" else f"(a{index}!)"
        parts.append(f"Tensor{mark} {tensor.name}")
    parts += [f"{scalar.type} {scalar.name}" for scalar in contract.scalars]
    return f"({', '.join(parts)}) -> ()"


def parameters(contract: Contract) -> list[TensorSpec]:
    """A layer's parameters: tensors that are only read and do not depend on a swept axis."""
    swept = {sweep.axis for sweep in contract.sweeps}
    return [
        tensor
        for tensor in contract.tensors
        if tensor.access == "read" and not swept & set(tensor.shape)
    ]


def _layer(contract: Contract) -> str | None:
    """The layer's source; None if its outputs cannot be allocated from its inputs."""
    params = parameters(contract)
    inputs = [each for each in contract.tensors if each not in params and each.access != "write"]
    allocations = []
    for tensor in contract.tensors:
        if tensor.access != "write":
            continue
        allocation = _allocation(contract, tensor, inputs)
        if allocation is None:
            return None
        allocations.append(f"        {tensor.name} = {allocation}\n")
    own = {each.name for each in params} | {each.name for each in contract.scalars}
    order = [each.name for each in contract.tensors] + [each.name for each in contract.scalars]
    call = ", ".join(f"self.{name}" if name in own else name for name in order)
    members = [f"    {each.name}: torch.Tensor\n" for each in params]
    members += [f"    {each.name}: {each.type}\n" for each in contract.scalars]
    return LAYER.format(
        entry=contract.name,
        name=layer_name(contract),
        summary=" ".join(contract.summary.split()),
        members="".join(members),
        taken="".join(f", {each.name}: torch.Tensor" for each in inputs),
        made="".join(allocations),
        call=call,
        written=", ".join(each.name for each in contract.written),
    )


def _allocation(contract: Contract, tensor: TensorSpec, inputs: list[TensorSpec]) -> str | None:
    sizes = []
    for axis in tensor.shape:
        source = next((each for each in inputs if axis in each.shape), None)
        if source is None:
            return None
        sizes.append(f"{source.name}.shape[{source.shape.index(axis)}]")
    like = next((each for each in inputs if each.dtype == tensor.dtype), None)
    options = contract.dtypes[tensor.dtype]
    if like is not None:
        dtype = f"{like.name}.dtype"
    elif len(options) == 1 and not options[0].startswith("="):
        dtype = f"torch.{options[0]}"
    else:
        return None
    shape = "".join(f"{size}, " for size in sizes)
    return f"torch.empty(({shape}), dtype={dtype}, device={inputs[0].name}.device)"


def readme(
    contract: Contract,
    evidence: Evaluation,
    language: Language,
    layer: str | None,
    variant: str | None,
    left_out: list[str],
) -> str:
    """The repository's page: how to load it, what was measured, and what it lacks."""
    lines = [
        f"# {contract.name}",
        "",
        f"`{contract.signature()}`. {' '.join(contract.summary.split())}",
        "",
        "```python",
        "from pathlib import Path",
        "from kernels import get_local_kernel",
        "",
        f'kernel = get_local_kernel(Path("."))  # {language}',
        f"kernel.{contract.signature()}",
        "```",
        "",
    ]
    if variant is None:
        lines += [
            "Build it first: `kernel-builder build-and-copy` (the repository holds no build).",
            "",
        ]
    written = ", ".join(each.name for each in contract.written)
    lines += [f"It writes {written} and returns nothing; an unsupported call is a ValueError."]
    if layer is not None:
        own = [each.name for each in parameters(contract)]
        own += [each.name for each in contract.scalars]
        lines += [
            f"Layer `{layer}` works in place, returns the written tensors, and takes "
            f"{', '.join(own) or 'nothing'} from the module that it replaces.",
        ]
    where = evidence.environment.device if evidence.environment else "an unknown device"
    lines += [
        "",
        f"## Measured by patcher on {where}",
        "",
        f"Against `{evidence.baseline or 'its strongest baseline'}`, in place, interleaved; "
        f"sweep `{evidence.sweep or 'not recorded'}`. The times are of the kernel alone: outside a "
        "CUDA graph, a call from Python adds microseconds for the op and its guards.",
        "",
        "| point | us per call | baseline | speedup (95 %) |",
        "| --- | ---: | ---: | --- |",
    ]
    for timing in evidence.timings:
        axes = " ".join(f"{axis}={size}" for axis, size in timing.axes.items())
        lines.append(
            f"| {axes} | {timing.candidate_us:.3f} | {timing.baseline_us:.3f} "
            f"| {timing.speedup:.3f} [{timing.speedup_low:.3f}, {timing.speedup_high:.3f}] |"
        )
    lines += ["", "## Not included", "", *(f"- {each}" for each in left_out), ""]
    return "\n".join(lines)


OP = '''"""{signature}, in place, as a torch op with its guards. Made by `patcher export`."""

import torch

{load}
{bind}
_TENSORS = {tensors!r}
_DTYPES = {dtypes!r}
_LAYOUTS = {layouts!r}
_ALIGNMENT = {alignments!r}
_SIZES = {sizes!r}


def _misplaced(value, layout, alignment):
    """Why the kernel does not support this tensor's address or strides, or None."""
    unaligned = "is not aligned to " + str(alignment) + " bytes"
    if value.data_ptr() % alignment:
        return unaligned
    if value.is_contiguous():
        return None
    if layout == "contiguous" or value.dim() < 2 or value.stride(-1) != 1:
        return "is not contiguous"
    outer = [each for each in zip(value.stride()[:-1], value.shape[:-1]) if each[1] > 1]
    if any(stride * value.element_size() % alignment for stride, _ in outer):
        return unaligned
    extent = value.shape[-1]
    for stride, size in sorted(outer):
        if stride < extent:
            return "has elements that share a place"
        extent += (size - 1) * stride
    if layout == "rows":
        follows = value.stride(-2)
        for axis in range(value.dim() - 2, 0, -1):
            follows *= value.shape[axis]
            if value.shape[axis - 1] > 1 and value.stride(axis - 1) != follows:
                return "has rows without one pitch"
    return None


def _refuse(tensors):
    """Why the kernel does not support these tensors, or None."""
    sizes, dtypes = {{}}, {{}}
    for name, value in tensors.items():
        symbol, axes = _TENSORS[name]
        if value.device.type != "{device}":
            return name + " is on " + value.device.type + ", not on {device}"
        if value.dim() != len(axes):
            return name + " must have the axes " + ", ".join(axes)
        misplaced = _misplaced(value, _LAYOUTS[name], _ALIGNMENT[name])
        if misplaced is not None:
            return name + " " + misplaced
        dtype = str(value.dtype).replace("torch.", "")
        if dtypes.setdefault(symbol, dtype) != dtype:
            return name + " is " + dtype + ", others " + dtypes[symbol]
        for axis, size in zip(axes, value.shape):
            if sizes.setdefault(axis, size) != size:
                return name + " differs in " + axis + " from the tensors before it"
    if dtypes not in _DTYPES:
        return "dtypes " + str(dtypes)
    for axis, (least, most, multiple) in _SIZES.items():
        size = sizes.get(axis, least)
        if size < least or (most is not None and size > most) or size % multiple:
            return axis + " " + str(size)
    return None


def _call({names}):
    reason = _refuse(dict({pairs}))
    if reason is not None:
        raise ValueError("{entry} does not support this call: " + reason)
    _kernel({names})


{entry} = torch.library.custom_op(
    __name__.partition(".")[0] + "::{entry}",
    _call,
    mutates_args={written!r},
    schema="{schema}",
)


@{entry}.register_fake
def _({names}):
    return None
'''
"""`__name__` begins with the id of `metadata.json`: ops must be registered as `torch.ops.<id>`."""

LAYER = '''"""A stateless layer for `kernelize`: its parameters are those of the module."""

import torch
from torch import nn

from ._op import {entry}


class {name}(nn.Module):
    {summary!r}

{members}    can_torch_compile = True
    has_backward = False

    def forward(self{taken}):
{made}        {entry}({call})
        return {written}
'''
