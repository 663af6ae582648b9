"""The contract of an op: `op.toml`, validated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from patcher.bench.errors import UsageError
from patcher.bench.ops.arithmetic import evaluate, names_in, solve
from patcher.bench.ops.dtypes import DTYPES, Dtype
from patcher.bench.records import Record

TensorLayout = Literal["contiguous", "rows", "strided"]


class TensorSpec(Record):
    name: str
    dtype: str
    """A symbol of `[dtypes]`."""
    shape: tuple[str, ...]
    """Arithmetic over axis names (`experts + 1`, `q_heads * head_dim`), row-major, as torch's
    shape. A size of 0 means that an optional tensor is absent. If a dtype packs two numbers in an
    item (`float4_e2m1fn_x2`), the last axis is half the number of values (`hidden / 2`)."""
    access: Literal["read", "write", "update"]
    """`update`: read and written in place. A tensor that is only read must stay unchanged."""
    values: Literal["any", "given", "bits"] = "any"
    """`given`: only `inputs.py` chooses them (indices, tables); `any`: the judge's regimes too.
    `bits`: every bit pattern is a valid value, and regimes do not apply (packed weights); the judge
    mixes a large one anew on the device for each call."""
    layout: TensorLayout = "contiguous"
    """`rows`: the last axis is dense, and the pitch, the one stride between rows, may exceed a row.
    `strided`: the last axis is dense, and the other axes have any order and strides at which no two
    elements share a place. Strides of an axis with fewer than two entries mean nothing."""
    in_part: bool = False
    """An updated tensor of which a call writes only what other arguments name, such as the slots of
    a cache. Others may write the rest meanwhile, so a tensor in part is never put back whole."""
    constant: bool = False
    """A weight: no kernel of a step writes it, so a dependent launch may read it early."""
    alignment: int = 16
    """Alignment of the first element in bytes; below 16 the judge tries misaligned ones. Where a
    tensor is not contiguous, every stride but the last is a multiple of it too."""
    scale_of: str = ""
    """The tensor that this one is a block scale of. The value of a number is the product with its
    scales, and the judge compares these products only. Several tensors may scale one."""
    block: tuple[int | str, ...] = ()
    """Block size along each axis of that tensor: a number, or arithmetic over axis names as in
    `shape`; 0: the whole axis. The scales are in the order of the blocks, row-major, whatever their
    own shape."""
    summary: str = ""


class ScalarSpec(Record):
    name: str
    type: Literal["float", "int"]
    value: float
    """The value that the sweep uses; the judge also tries others of a `float`."""
    summary: str = ""


class Point(Record):
    """One concrete problem: a size for every axis, a dtype for every symbol."""

    axes: dict[str, int]
    dtypes: dict[str, str]

    def label(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"{axes} {'/'.join(dict.fromkeys(self.dtypes.values()))}"


SIZED = "@"
"""In a sweep's name, between that in the contract and the sizes that differ from it."""


class Sweep(Record):
    name: str
    """As in the contract; else `NAME@AXIS=SIZE,SYMBOL=DTYPE`, `SIZE:SIZE` for the swept axis."""
    device: Literal["cpu", "cuda"]
    dtypes: dict[str, str]
    axis: str
    values: tuple[int, ...]
    fixed: dict[str, int]

    def sized(
        self, sizes: Mapping[str, int], dtypes: Mapping[str, str], values: Sequence[int] = ()
    ) -> Sweep:
        """The sweep with other sizes and dtypes, as its name then says: `bf16@hidden=4096`.

        Args:
            sizes: by axis; axes that the sweep does not fix are left out.
            dtypes: by symbol.
            values: of the swept axis; none: as they are.
        """
        axes = {axis: sizes.get(axis, size) for axis, size in self.fixed.items()}
        kinds, swept = {**self.dtypes, **dtypes}, tuple(values) or self.values
        changed = [f"{axis}={size}" for axis, size in axes.items() if size != self.fixed[axis]]
        changed += [f"{name}={kind}" for name, kind in kinds.items() if kind != self.dtypes[name]]
        changed += [f"{self.axis}={':'.join(map(str, swept))}"] if swept != self.values else []
        name = f"{self.name}{SIZED}{','.join(changed)}" if changed else self.name
        update = {"name": name, "fixed": axes, "dtypes": kinds, "values": swept}
        return self.model_copy(update=update)

    def points(self) -> list[Point]:
        return [
            Point(axes={self.axis: value, **self.fixed}, dtypes=self.dtypes)
            for value in self.values
        ]


class HiddenShape(Record):
    axes: dict[str, int]


class AxisGuard(Record):
    """Sizes of an axis for which a kernel must be correct."""

    minimum: int = Field(default=0, ge=0)
    maximum: int | None = None
    multiple_of: int = Field(default=1, ge=1)

    def takes(self, size: int) -> bool:
        """Whether it allows a size."""
        most = size if self.maximum is None else self.maximum
        return self.minimum <= size <= most and size % self.multiple_of == 0

    def __str__(self) -> str:
        """`a multiple of 8, at most 16,384`."""
        told = [f"a multiple of {self.multiple_of:,}"] if self.multiple_of > 1 else []
        told += [f"at least {self.minimum:,}"] if self.minimum else []
        told += [f"at most {self.maximum:,}"] if self.maximum is not None else []
        return ", ".join(told) or "any size"


class Guards(Record):
    """Where a kernel for this op may be called; elsewhere the engine's own code runs."""

    axes: dict[str, AxisGuard] = Field(default_factory=dict)
    contiguous: bool = True
    graph_safe: bool = True
    deterministic: bool = True
    """Whether equal inputs must give equal bits. If false (atomics), a candidate may declare itself
    nondeterministic by the words `patcher: nondeterministic` in its source."""


class Accuracy(Record):
    reduction: str
    """Length of the longest sum, of axis names."""
    subnormals: Literal["may be flushed", "kept"] = "may be flushed"
    """Whether float32's subnormal numbers may be flushed to zero, as fast arithmetic does."""
    exact: tuple[str, ...] = ()
    """For an op that only adds and multiplies: tensors that give exact sums if they are 0 or 1."""


class Cost(Record):
    """Arithmetic over axis names and dtype symbols (their item sizes)."""

    bytes: str
    flops: str
    rewritable: bool = False
    """Another formula is as right: only bytes make a time too short, and infinities may cancel."""


class Symbol(Record):
    pattern: str
    """Regular expression to search in a kernel's name."""


class PatchPointSpec(Record):
    engine: str
    versions: str
    point: str
    summary: str
    calls_per_layer: int
    """Calls in one decoder layer of gpt-oss; 0 for a point that is none of its layers'."""
    once_per_layer_taken: bool = False
    """Whether a step calls each layer that a receipt counts as taken once, in any model."""
    takes: dict[str, int] = Field(default_factory=dict)
    """Calls per layer that this patch point takes over from other points of the engine, by name."""
    replaces: str = ""
    """Pattern of kernels that ran there before but belong to no op, such as a library's matmuls; it
    does not change their row in a ledger."""


class Contract(Record):
    """`op.toml`, validated."""

    schema_version: int
    name: str
    operation: str
    summary: str
    source: str
    dtypes: dict[str, tuple[str, ...]]
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[ScalarSpec, ...] = ()
    sweeps: tuple[Sweep, ...]
    hidden: tuple[HiddenShape, ...] = ()
    guards: Guards
    accuracy: Accuracy
    cost: Cost
    symbols: tuple[Symbol, ...] = ()
    patch_points: tuple[PatchPointSpec, ...] = ()
    reads: tuple[str, ...] = ()
    """Files of other ops that this one's inputs and baselines run, by their path in the folder of
    ops; they are part of `Op.digest`."""

    @model_validator(mode="after")
    def _known_dtypes(self) -> Contract:
        for symbol, options in self.dtypes.items():
            for option in options:
                same = option.startswith("=") and option[1:] in self.dtypes
                if not same and option not in DTYPES:
                    known = ", ".join(DTYPES)
                    raise ValueError(f"dtype {option} of {symbol} is none of: {known}")
        return self

    @model_validator(mode="after")
    def _sound_scales(self) -> Contract:
        by_name = {tensor.name: tensor for tensor in self.tensors}
        for scale in self.tensors:
            scaled = by_name.get(scale.scale_of)
            if scale.scale_of and (scaled is None or scaled.scale_of):
                raise ValueError(f"{scale.name} scales {scale.scale_of}, which holds no values")
            if len(scale.block) != (len(scaled.shape) if scaled else 0):
                raise ValueError(
                    f"{scale.name}: block needs a size for each axis of what it scales"
                )
            if any(isinstance(size, int) and size < 0 for size in scale.block):
                raise ValueError(f"{scale.name}: a block has no size below 0")
        return self

    @model_validator(mode="after")
    def _parts_are_updated(self) -> Contract:
        for tensor in self.tensors:
            if tensor.in_part and tensor.access != "update":
                raise ValueError(f"{tensor.name}: only an updated tensor is written in part")
        return self

    @property
    def written(self) -> list[TensorSpec]:
        return [tensor for tensor in self.tensors if tensor.access != "read"]

    @property
    def compared(self) -> list[TensorSpec]:
        """Tensors whose values a call determines: they or one of their scales are written."""
        written = {tensor.scale_of or tensor.name for tensor in self.written}
        return [tensor for tensor in self.tensors if tensor.name in written]

    def scales_of(self, name: str) -> list[TensorSpec]:
        """The block scales of a tensor."""
        return [tensor for tensor in self.tensors if tensor.scale_of == name]

    def dtype_choices(self) -> list[dict[str, str]]:
        """Every combination of dtypes that the contract allows, with `=T` resolved."""
        choices: list[dict[str, str]] = [{}]
        for symbol, options in self.dtypes.items():
            expanded: list[dict[str, str]] = []
            for chosen in choices:
                for option in dict.fromkeys(
                    chosen[o[1:]] if o.startswith("=") else o for o in options
                ):
                    expanded.append({**chosen, symbol: option})
            choices = expanded
        return choices

    @property
    def narrow_dtypes(self) -> list[Dtype]:
        """Dtypes of at most 8 bits per number that the contract allows."""
        names = dict.fromkeys(name for choice in self.dtype_choices() for name in choice.values())
        return [DTYPES[name] for name in names if DTYPES[name].narrow]

    def shape(self, tensor: TensorSpec, point: Point) -> tuple[int, ...]:
        return tuple(int(_arithmetic(size, point)) for size in tensor.shape)

    def block(self, scale: TensorSpec, point: Point) -> tuple[int, ...]:
        """The block of a scale in numbers.

        Raises:
            UsageError: an expression gives no whole number, or one below 1.
        """
        told = [_arithmetic(s, point) if isinstance(s, str) else s for s in scale.block]
        for size, number in zip(scale.block, told, strict=True):
            if isinstance(size, str) and (number < 1 or number != int(number)):
                said = f"{scale.name}: a block of {size} is {number:g} at {point.label()}"
                raise UsageError(said, "correct `block` in op.toml")
        return tuple(int(number) for number in told)

    def axes_of(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The axes of a call whose tensors have these shapes, as far as shapes determine them; the
        swept axis comes first.

        Raises:
            ValueError: the shapes do not match the contract, or each other.
        """
        pairs = zip(self.tensors, shapes, strict=True)
        found = solve([pair for t, shape in pairs for pair in zip(t.shape, shape, strict=True)])
        swept = [sweep.axis for sweep in self.sweeps if sweep.axis in found]
        return {axis: found[axis] for axis in (*swept, *found)}

    def point_of(self, sweep: Sweep, axes: dict[str, int]) -> Point:
        """The point of a recorded timing. A sweep of an earlier contract may lack an axis; then the
        size in today's sweep of that name is meant."""
        base = sweep.name.partition(SIZED)[0]
        known = [each.fixed for each in self.sweeps if each.name == base]
        fixed = {**(known[0] if known else {}), **sweep.fixed}
        return Point(axes={**fixed, **axes}, dtypes=sweep.dtypes)

    def longest_sum(self, point: Point) -> int:
        return int(_arithmetic(self.accuracy.reduction, point))

    def bytes_moved(self, point: Point) -> int:
        """Bytes that any implementation must move for one call."""
        return int(_arithmetic(self.cost.bytes, point))

    def flops(self, point: Point) -> int:
        return int(_arithmetic(self.cost.flops, point))

    def working_axes(self) -> frozenset[str]:
        """The sizes that determine the cost of a call; not the size of a cache that it reads."""
        return names_in(self.cost.bytes) | names_in(self.cost.flops)

    def same_terms(self, other: Contract) -> bool:
        """Whether both require the same of a kernel; summaries may differ."""
        same: bool = _terms(self.model_dump()) == _terms(other.model_dump())
        return same

    def signature(self) -> str:
        """The entry as text: `fused_add_rms_norm(input, residual, weight, epsilon)`."""
        names = [tensor.name for tensor in self.tensors] + [scalar.name for scalar in self.scalars]
        return f"{self.name}({', '.join(names)})"

    def matches(self, kernel_name: str) -> bool:
        return any(re.search(symbol.pattern, kernel_name, re.IGNORECASE) for symbol in self.symbols)


def _arithmetic(expression: str, point: Point) -> float:
    """Evaluate an expression over axes and dtype symbols (item sizes)."""
    items = {symbol: DTYPES[dtype].item_bytes for symbol, dtype in point.dtypes.items()}
    return evaluate(expression, {**point.axes, **items})


def _terms(value: Any) -> Any:
    """A dumped contract without its descriptions."""
    if isinstance(value, dict):
        return {key: _terms(item) for key, item in value.items() if key != "summary"}
    if isinstance(value, list | tuple):
        return [_terms(item) for item in value]
    return value
