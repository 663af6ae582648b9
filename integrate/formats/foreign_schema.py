"""The records of flashinfer-bench 0.1.2 (`data/*.py` there), for import.

They are strict: an unknown field is refused by name, never dropped.
"""

from __future__ import annotations

from typing import Any, Literal

from patcher.bench import Record


class Axis(Record):
    type: Literal["const", "var"]
    value: int | None = None
    description: str | None = None


class Tensor(Record):
    shape: tuple[str, ...] | None
    """None for a scalar."""
    dtype: str
    description: str | None = None


class Definition(Record):
    name: str
    op_type: str
    axes: dict[str, Axis]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    reference: str
    tags: tuple[str, ...] = ()
    description: str | None = None
    constraints: tuple[str, ...] = ()


class Source(Record):
    path: str
    content: str


class BuildSpec(Record):
    language: Literal["python", "triton", "cpp", "cuda", "tilelang"]
    target_hardware: tuple[str, ...]
    entry_point: str
    """`file::function`."""
    dependencies: tuple[str, ...] = ()
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None


class Solution(Record):
    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: tuple[Source, ...]
    description: str | None = None


class Input(Record):
    type: Literal["random", "scalar", "safetensors"]
    value: int | float | bool | None = None
    path: str | None = None
    tensor_key: str | None = None


class ForeignWorkload(Record):
    axes: dict[str, int]
    inputs: dict[str, Input]
    uuid: str


class Trace(Record):
    definition: str
    workload: ForeignWorkload
    solution: str | None = None
    evaluation: dict[str, Any] | None = None
