"""Write op folders for imported ops: contract, reference, inputs and baselines."""

from __future__ import annotations

import tomllib

import tomlkit

from patcher.bench import Contract, VerificationError
from patcher.integrate.formats.foreign_schema import Definition


def op_files(contract: Contract, definition: Definition) -> dict[str, bytes]:
    """The op folder of a foreign Definition: its reference, generic inputs and one baseline."""
    values = _values(contract, definition)
    return _folder(
        contract,
        {
            "definition.py": definition.reference.rstrip("\n") + "\n",
            "reference.py": REFERENCE.format(**values),
            "inputs.py": INPUTS.format(**values),
            "baselines.py": BASELINES.format(**values),
        },
    )


def own_op_files(contract: Contract, definition: Definition) -> dict[str, bytes]:
    """The op folder of an op of patcher's, whose Definition holds its `reference` and `control`."""
    values = _values(contract, definition)
    return _folder(
        contract,
        {
            "reference.py": definition.reference.rstrip("\n") + "\n",
            "inputs.py": INPUTS.format(**values),
            "baselines.py": OWN_BASELINES.format(**values),
        },
    )


def _values(contract: Contract, definition: Definition) -> dict[str, object]:
    order = [each.name for each in contract.tensors] + [each.name for each in contract.scalars]
    return {
        "title": contract.name,
        "names": ", ".join(order),
        "named": ", ".join(f"{name}={name}" for name in order),
        "inputs": ", ".join(definition.inputs),
        "outputs": tuple(each.name for each in contract.written),
        "written": ", ".join(each.name for each in contract.written),
        "tensors": {each.name: (each.dtype, each.shape, each.access) for each in contract.tensors},
    }


def _folder(contract: Contract, files: dict[str, str]) -> dict[str, bytes]:
    document = contract.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    toml = tomlkit.dumps(document)
    if Contract.model_validate(tomllib.loads(toml)) != contract:
        raise VerificationError(f"the contract of {contract.name} cannot be written as TOML", "")
    files = {"op.toml": toml} | files
    return {f"{contract.name}/{name}": text.encode() for name, text in files.items()}


REFERENCE = '''"""{title}: the float64 reference of definition.py and the control that must fail."""

import runpy
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

_run = runpy.run_path(str(Path(__file__).with_name("definition.py")))["run"]
_OUTPUTS = {outputs!r}
_NARROWING = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _Wide(TorchFunctionMode):
    """Replaces every floating dtype in the reference by float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _NARROWING:
            function = torch.Tensor.double
        kwargs = {{name: _widened(value) for name, value in (kwargs or {{}}).items()}}
        return function(*map(_widened, args), **kwargs)


def _widened(value):
    narrow = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if narrow else value


def _named(values):
    values = values if isinstance(values, (tuple, list)) else (values,)
    return dict(zip(_OUTPUTS, values, strict=True))


def reference({names}):
    """The result of `run` with every floating-point number in float64; whole ones come so, too."""
    given = [
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for value in ({inputs},)
    ]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of numbers that `run` makes, alone or of integers
    try:
        with _Wide():
            values = _named(_run(*given))
    finally:
        torch.set_default_dtype(before)
    return {{
        name: value if value.is_floating_point() else value.double()
        for name, value in values.items()
    }}


def control({names}):
    """The result of `run` with two bits fewer in each output."""
    return {{name: _coarser(value) for name, value in _named(_run({inputs})).items()}}


def _coarser(value):
    if not value.is_floating_point():
        return value + 1
    mantissa, exponent = torch.frexp(value.double())
    steps = 0.5 / torch.finfo(value.dtype).eps
    return torch.ldexp(torch.round(mantissa * steps) / steps, exponent).to(value.dtype)
'''

INPUTS = '''"""Seeded inputs of {title}: standard normal numbers, as flashinfer-bench draws them."""

import math

import torch

REGIMES = ("normal",)
_TENSORS = {tensors!r}


def make(point, generator, regime):
    """Every tensor on the generator's device; tensors that are only written hold NaN or -1.

    Raises:
        ValueError: unknown regime.
    """
    if regime not in REGIMES:
        raise ValueError(f"unknown regime {{regime!r}}")
    tensors = {{}}
    for name, (symbol, axes, access) in _TENSORS.items():
        shape = [point.axes[axis] for axis in axes]
        dtype = getattr(torch, point.dtypes[symbol])
        if access == "write":
            fill = math.nan if dtype.is_floating_point else -1
            tensors[name] = torch.full(shape, fill, dtype=dtype, device=generator.device)
        else:
            drawn = torch.randn(shape, generator=generator, device=generator.device)
            tensors[name] = drawn.to(dtype)
    return tensors
'''

BASELINES = '''"""The baseline: the Definition's reference in its own dtypes."""

import runpy
from pathlib import Path

_run = runpy.run_path(str(Path(__file__).with_name("definition.py")))["run"]


def reference(device):
    def run({names}):
        values = _run({inputs})
        return tuple(values) if isinstance(values, (tuple, list)) else (values,)

    return run


BASELINES = {{"reference": reference}}
ACCURACY_BASELINE = "reference"
'''

OWN_BASELINES = '''"""The baseline: the float64 reference, rounded to the outputs' dtypes."""

import runpy
from pathlib import Path

_reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))["reference"]


def reference(device):
    def run({names}):
        values = _reference({named})
        written = dict(zip({outputs!r}, ({written},), strict=True))
        return tuple(values[name].to(value.dtype) for name, value in written.items())

    return run


BASELINES = {{"reference": reference}}
ACCURACY_BASELINE = "reference"
'''
