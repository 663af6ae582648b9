"""Convert an op to a Definition of flashinfer-bench: a sweep's dtypes and sizes, the reference."""

from __future__ import annotations

import ast
import sys
from typing import Any

from patcher.bench import Contract, Op, Sweep, TensorSpec, UsageError

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
)
"""Our dtypes that flashinfer-bench supports with the same shape."""
SCALARS = {"float": "float32", "int": "int64"}
RUN = '''

def run({names}):
    """`reference`, in the dtypes of the Definition's outputs."""
    values = reference({arguments})
    return {returned}
'''


def definition_of(op: Op, sweep: Sweep) -> dict[str, Any]:
    """The Definition of an op at the dtypes and fixed sizes of a sweep."""
    contract = op.contract
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    spec: dict[str, Any]
    for tensor in contract.tensors:
        dtype = sweep.dtypes[tensor.dtype]
        if dtype not in DTYPES:
            raise UsageError(f"flashinfer-bench has no dtype {dtype} ({tensor.name})")
        spec = {"shape": list(tensor.shape), "dtype": dtype}
        if tensor.summary:
            spec["description"] = tensor.summary
        if tensor.access != "write":
            inputs[tensor.name] = spec
        if tensor.access != "read":
            outputs[output_name(tensor)] = spec
    for scalar in contract.scalars:
        spec = {"shape": None, "dtype": SCALARS[scalar.type]}
        inputs[scalar.name] = spec | ({"description": scalar.summary} if scalar.summary else {})
    axes: dict[str, Any] = {
        axis: {"type": "const", "value": size} for axis, size in sweep.fixed.items()
    }
    axes[sweep.axis] = {"type": "var"}
    if clash := inputs.keys() & outputs.keys():
        raise UsageError(f"{op.name} has both a tensor and an output called {clash.pop()}")
    sizes = "".join(f"_{axis}{size}" for axis, size in sorted(sweep.fixed.items()))
    dtypes = "_".join(dict.fromkeys(sweep.dtypes.values()))
    return {
        "name": f"{op.name}{sizes}_{dtypes}",
        "op_type": contract.operation,
        "axes": axes,
        "inputs": inputs,
        "outputs": outputs,
        "reference": _reference(op, sweep),
        "tags": ["author:patcher"],
        "description": " ".join(contract.summary.split()),
        "constraints": _constraints(contract),
    }


def output_name(tensor: TensorSpec) -> str:
    """The output's name for a written tensor; one that is updated in place gets a suffix."""
    return tensor.name if tensor.access == "write" else f"{tensor.name}_out"


def _constraints(contract: Contract) -> list[str]:
    axes = {axis for tensor in contract.tensors for axis in tensor.shape}
    constraints = []
    for axis, guard in contract.guards.axes.items():
        if axis in axes:
            constraints += [f"{axis} % {guard.multiple_of} == 0"] if guard.multiple_of > 1 else []
            constraints += [f"{axis} >= {guard.minimum}"] if guard.minimum > 0 else []
            constraints += [f"{axis} <= {guard.maximum}"] if guard.maximum is not None else []
    return constraints


def _reference(op: Op, sweep: Sweep) -> str:
    """`reference.py` as one string with the function `run` that the schema requires."""
    contract = op.contract
    text = (op.folder / "reference.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if module.partition(".")[0] not in {"torch", "numpy", *sys.stdlib_module_names}:
                raise UsageError(
                    f"the reference of {op.name} imports {module}, so it is not self-contained",
                    "a Definition's reference may use torch and the standard library",
                )
    if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise UsageError(f"the reference of {op.name} has a function run", "rename it")
    given = [each for each in contract.tensors if each.access != "write"]
    names = [each.name for each in given] + [each.name for each in contract.scalars]
    arguments = [f"{name}={name}" for name in names]
    # a tensor that is only written is no input of a Definition; a reference must not read it
    arguments += [f"{each.name}=None" for each in contract.tensors if each.access == "write"]
    values = [
        f'values["{each.name}"].to(torch.{sweep.dtypes[each.dtype]})' for each in contract.written
    ]
    returned = values[0] if len(values) == 1 else f"({', '.join(values)})"
    run = RUN.format(names=", ".join(names), arguments=", ".join(arguments), returned=returned)
    return text.rstrip("\n") + "\n" + ("" if "import torch\n" in text else "\nimport torch\n") + run
