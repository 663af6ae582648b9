"""Definitions and workloads of SOL-ExecBench, as its documents describe them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from patcher.bench import Record


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
    axes: dict[str, Annotated[int, Field(ge=1, le=1 << 40)]]
    inputs: dict[str, SolInput]
    tolerance: dict[str, Any] | None = None
