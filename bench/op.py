"""An op of the kernel library: its contract, reference, inputs, baselines and solutions."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError

from bench.candidate import SUFFIXES, Candidate, Language
from bench.errors import UsageError
from bench.records import Record

ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class TensorSpec(Record):
    name: str
    dtype: str
    """A symbol of `[dtypes]`."""
    shape: tuple[str, ...]
    """Names of axes; row-major contiguous."""
    access: Literal["read", "write", "update"]
    summary: str = ""


class ScalarSpec(Record):
    name: str
    type: Literal["float", "int"]
    value: float
    """The value that the sweep uses; the judge also tries others."""
    summary: str = ""


class Point(Record):
    """One concrete problem: a size for every axis, a dtype for every symbol."""

    axes: dict[str, int]
    dtypes: dict[str, str]

    def label(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"{axes} {'/'.join(dict.fromkeys(self.dtypes.values()))}"


class Sweep(Record):
    name: str
    device: Literal["cpu", "cuda"]
    dtypes: dict[str, str]
    axis: str
    values: tuple[int, ...]
    fixed: dict[str, int]

    def points(self) -> list[Point]:
        return [
            Point(axes={self.axis: value, **self.fixed}, dtypes=self.dtypes)
            for value in self.values
        ]


class HiddenShape(Record):
    axes: dict[str, int]


class Guards(Record):
    """Where a kernel for this op may be called; elsewhere the engine's own code runs."""

    hidden_multiple_of: int = 1
    hidden_max: int | None = None
    contiguous: bool = True
    graph_safe: bool = True


class Accuracy(Record):
    reduction: str
    """The axis of the longest sum."""


class Cost(Record):
    """Arithmetic over axis names and dtype symbols (their item sizes)."""

    bytes: str
    flops: str


class Symbol(Record):
    pattern: str
    """Regular expression searched in a kernel's name."""


class PatchPointSpec(Record):
    engine: str
    versions: str
    point: str
    summary: str
    calls_per_layer: int


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

    @property
    def written(self) -> list[TensorSpec]:
        return [tensor for tensor in self.tensors if tensor.access != "read"]

    def dtype_choices(self) -> list[dict[str, str]]:
        """Every combination of dtypes that the contract allows, `=T` resolved."""
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

    def shape(self, tensor: TensorSpec, point: Point) -> tuple[int, ...]:
        return tuple(point.axes[axis] for axis in tensor.shape)

    def bytes_moved(self, point: Point) -> int:
        """Bytes that any implementation must move for one call."""
        return int(_arithmetic(self.cost.bytes, point))

    def flops(self, point: Point) -> int:
        return int(_arithmetic(self.cost.flops, point))

    def signature(self) -> str:
        """The entry as people read it: `fused_add_rms_norm(input, residual, weight, epsilon)`."""
        names = [tensor.name for tensor in self.tensors] + [scalar.name for scalar in self.scalars]
        return f"{self.name}({', '.join(names)})"

    def matches(self, kernel_name: str) -> bool:
        return any(re.search(symbol.pattern, kernel_name, re.IGNORECASE) for symbol in self.symbols)


def _arithmetic(expression: str, point: Point) -> float:
    """Evaluate `+ - * /` over axes and dtype symbols (item sizes)."""
    names = {**point.axes, **{symbol: ITEM_SIZE[dtype] for symbol, dtype in point.dtypes.items()}}

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = value(left), value(right)
                match operator:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.Div():
                        return a / b
        raise ValueError(f"not arithmetic: {expression}")

    return value(ast.parse(expression, mode="eval").body)


class SolutionInfo(Record):
    """`solution.toml` beside a source in `solutions/<name>/`."""

    name: str
    language: Language
    device: Literal["cpu", "cuda"]
    summary: str
    origin: str
    """Who or what wrote it: `hand`, or the loop's run that made it."""


class Op:
    """One folder of `kernels/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / "op.toml").read_text(encoding="utf-8")
        try:
            self.contract = Contract(**tomllib.loads(text))
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{folder / 'op.toml'} is not a valid contract: {error}") from error

    @property
    def name(self) -> str:
        return self.contract.name

    @cached_property
    def reference(self) -> Callable[..., dict[str, Any]]:
        """`reference(**inputs) -> {written tensor: float64 value}`; takes tensors of any dtype."""
        function: Callable[..., dict[str, Any]] = _load(self.folder / "reference.py").reference
        return function

    @cached_property
    def control(self) -> Callable[..., dict[str, Any]]:
        """The op in lower precision than the contract wants: the judge must reject it."""
        function: Callable[..., dict[str, Any]] = _load(self.folder / "reference.py").control
        return function

    @cached_property
    def inputs(self) -> ModuleType:
        """`make(point, seed, regime) -> {tensor: value}` and `REGIMES`."""
        return _load(self.folder / "inputs.py")

    @cached_property
    def baselines(self) -> dict[str, Callable[[str], Callable[..., Any]]]:
        """Name to factory: `factory(device)` gives a callable or raises `ImportError` saying why
        not here.

        A baseline writes in place, or returns a tuple of what the contract says is written, in
        contract order.
        """
        found: dict[str, Callable[[str], Callable[..., Any]]] = _load(
            self.folder / "baselines.py"
        ).BASELINES
        return found

    @cached_property
    def honest_baseline(self) -> str:
        """The baseline whose error against float64 a candidate's error is measured by."""
        name: str = _load(self.folder / "baselines.py").HONEST
        return name

    def sweep(self, device: str, name: str | None = None) -> Sweep:
        """The sweep of that name, or the first for the device.

        Raises:
            UsageError: there is none.
        """
        fitting = [sweep for sweep in self.contract.sweeps if sweep.device == device]
        if name is not None:
            fitting = [sweep for sweep in fitting if sweep.name == name]
        if not fitting:
            known = ", ".join(f"{sweep.name} ({sweep.device})" for sweep in self.contract.sweeps)
            raise UsageError(
                f"{self.name} has no sweep {name or ''} for {device}", f"it has: {known}"
            )
        return fitting[0]

    def solutions(self) -> Iterator[tuple[SolutionInfo, Candidate]]:
        """Every shipped solution, by folder name."""
        for folder in sorted((self.folder / "solutions").iterdir()):
            manifest = folder / "solution.toml"
            if manifest.is_file():
                info = SolutionInfo(
                    name=folder.name, **tomllib.loads(manifest.read_text(encoding="utf-8"))
                )
                source = folder / f"{self.name}{SUFFIXES[info.language]}"
                yield info, Candidate.from_file(self.name, source, info.language)


def _load(path: Path) -> ModuleType:
    """Import a file of the library by path; `kernels/` is data, not a package."""
    name = f"_patcher_op_{path.parent.name}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def library() -> Path:
    """The folder `kernels/`: beside the packages in a checkout, `patcher/kernel_library` when
    installed.
    """
    checkout = Path(__file__).resolve().parent.parent / "kernels"
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec("patcher.kernel_library")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "the kernel library is missing from this installation", "reinstall patcher"
        )
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def load_ops() -> dict[str, Op]:
    """Every op of the library, by name."""
    found = [Op(path.parent) for path in sorted(library().glob("*/op.toml"))]
    return {op.name: op for op in found}


def load_op(name: str) -> Op:
    """The op of that name.

    Raises:
        UsageError: no such op.
    """
    try:
        return load_ops()[name]
    except KeyError:
        raise UsageError(
            f"unknown op {name!r}", f"the library has: {', '.join(load_ops())}"
        ) from None
