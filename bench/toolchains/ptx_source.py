"""What a PTX source says of its kernels: their parameters, and how each is launched.

Comments above a kernel say its launch, one thing a line:

    //@ kernel scaled_add_f32
    //@ when T == float32, n % 4 == 0
    //@ grid (n + 255) // 256
    //@ block 256
    //@ shared 4 * n

`when` and `shared` may be missing, and `block` where the kernel has `.reqntid` or `.maxntid`. A
call runs the first kernel whose conditions hold. Parameters are bound by their names: a tensor's is
its address, a scalar's its value, an axis' its size; `x_size_0` and `x_stride_0` are of an axis.
Expressions are of the latter, of integer scalars and numbers, with `+ - * // %`, `min` and `max`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from patcher.bench.ops.contract import Contract
from patcher.bench.ops.dtypes import DTYPES

_DIRECTIVE = re.compile(r"^[ \t]*//@[ \t]*(?P<word>\w+)[ \t]*(?P<rest>.*?)[ \t]*$")
_ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<params>[^)]*)\)(?P<bounds>[^{]*)\{")
_BOUNDS = re.compile(r"\.(?:reqntid|maxntid)\s+(?P<block>\d+(?:\s*,\s*\d+){0,2})")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PART = re.compile(r"(?P<tensor>\w+)_(?P<what>size|stride)_(?P<axis>\d+)")
_TYPES = {
    **dict.fromkeys((".u64", ".s64", ".b64"), "int64_t"),
    **dict.fromkeys((".u32", ".s32", ".b32"), "int32_t"),
    ".f32": "float",
    ".f64": "double",
}
_OPERATORS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"},
    **{ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
}
_CODES = {"float": "kDLFloat", "bfloat": "kDLBfloat", "int": "kDLInt", "uint": "kDLUInt"}


class PtxSourceError(ValueError):
    """A source that cannot be launched as it is written; the message names the line."""


@dataclass
class PtxKernel:
    """One kernel of a source, bound to a contract: C++ expressions for its launch."""

    name: str
    line: int
    """Where its first directive is."""
    conditions: list[str] = field(default_factory=list)
    grid: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    shared: str = "0"
    arguments: list[tuple[str, str]] = field(default_factory=list)
    """C++ type and expression of each parameter."""


def kernel_names(source: str) -> list[str]:
    """The kernels that a PTX source defines."""
    return [match["name"] for match in _ENTRY.finditer(_without_comments(source))]


def kernels_of(source: str, file_name: str, contract: Contract) -> list[PtxKernel]:
    """The kernels of a source in the order in which a call tries them.

    Args:
        source: the PTX.
        file_name: what messages call it.
        contract: whose tensors, scalars and axes the source names.

    Raises:
        PtxSourceError: a directive or parameter is not understood, or one is missing.
    """
    bound = _Bound(contract, file_name)
    plain = _without_comments(source)
    entries = {match["name"]: match for match in _ENTRY.finditer(plain)}
    kernels: list[PtxKernel] = []
    for number, text in enumerate(source.splitlines(), 1):
        if (match := _DIRECTIVE.match(text)) is None:
            continue
        word, rest = match["word"], match["rest"]
        if word == "kernel":
            if rest not in entries:
                raise bound.error(number, f"there is no `.entry {rest}`")
            if rest in [kernel.name for kernel in kernels]:
                raise bound.error(number, f"{rest} has directives already")
            kernels.append(PtxKernel(rest, number))
        elif not kernels:
            raise bound.error(number, f"`//@ {word}` stands before any `//@ kernel NAME`")
        else:
            bound.read(kernels[-1], word, rest, number)
    if not kernels:
        raise bound.error(1, "no `//@ kernel NAME` with its `//@ grid` says what to launch")
    for kernel in kernels:
        entry = entries[kernel.name]
        line = plain.count("\n", 0, entry.start()) + 1
        if not kernel.grid:
            raise bound.error(kernel.line, f"{kernel.name} has no `//@ grid`")
        if not kernel.block:
            limit = _BOUNDS.search(entry["bounds"])
            if limit is None:
                raise bound.error(kernel.line, f"{kernel.name} has no `//@ block` or `.reqntid`")
            kernel.block = _three([part.strip() for part in limit["block"].split(",")])
        parameters = [part.strip() for part in entry["params"].split(",")]
        kernel.arguments = [bound.argument(part, line) for part in parameters if part]
    return kernels


class _Bound:
    """The names of a contract as C++."""

    def __init__(self, contract: Contract, file_name: str) -> None:
        self._contract, self._file = contract, file_name
        self._tensors = {tensor.name: tensor for tensor in contract.tensors}
        self._scalars = {scalar.name: scalar for scalar in contract.scalars}

    def error(self, line: int, message: str) -> PtxSourceError:
        return PtxSourceError(f"{self._file}, line {line}: {message}")

    def read(self, kernel: PtxKernel, word: str, rest: str, line: int) -> None:
        """Read one directive of a kernel."""
        parts = self._parsed(rest, line)
        match word:
            case "when":
                kernel.conditions += [self._condition(part, line) for part in parts]
            case "grid" | "block" if 1 <= len(parts) <= 3:
                setattr(kernel, word, _three([self._value(part, line) for part in parts]))
            case "shared" if len(parts) == 1:
                kernel.shared = self._value(parts[0], line)
            case "grid" | "block" | "shared":
                raise self.error(line, f"`//@ {word}` has {len(parts)} expressions")
            case _:
                known = "kernel, when, grid, block, shared"
                raise self.error(line, f"unknown `//@ {word}`: there are {known}")

    def argument(self, parameter: str, line: int) -> tuple[str, str]:
        """C++ type and value of a `.param`."""
        words = parameter.split()
        name = words[-1]
        kind = next((_TYPES[word] for word in words if word in _TYPES), None)
        if kind is None or not re.fullmatch(r"[\w$]+", name):
            known = " ".join(_TYPES)
            raise self.error(line, f"the parameter `{parameter}` is of none of the types {known}")
        if name in self._tensors:
            if kind != "int64_t":
                raise self.error(line, f"{name} is a tensor's address, so it is .u64")
            return "void*", f"{name}.data_ptr()"
        scalar = self._scalars.get(name)
        if scalar is not None and scalar.type == "float":
            if kind not in ("float", "double"):
                raise self.error(line, f"{name} is a float: .f32 or .f64")
            return kind, f"static_cast<{kind}>({name})"
        if kind in ("float", "double"):
            raise self.error(line, f"{name} is a whole number: .u32, .s32, .u64 or .s64")
        return kind, f"static_cast<{kind}>({self._integer(name, line)})"

    def _parsed(self, text: str, line: int) -> list[ast.expr]:
        try:
            node = ast.parse(f"({text},)", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.error(line, f"`{text}` is no expression") from error
        assert isinstance(node, ast.Tuple)
        return node.elts

    def _condition(self, node: ast.expr, line: int) -> str:
        match node:
            case ast.Compare(left=ast.Name(id=symbol), ops=[operator], comparators=[other]) if (
                symbol in self._contract.dtypes
            ):
                name = ast.unparse(other)
                if not isinstance(operator, ast.Eq) or name not in DTYPES:
                    raise self.error(line, f"`{ast.unparse(node)}`: say `{symbol} == float32`")
                return self._has_dtype(symbol, name)
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                if type(operator) in _OPERATORS:
                    sign = _OPERATORS[type(operator)]
                    return f"{self._value(left, line)} {sign} {self._value(right, line)}"
        raise self.error(line, f"`{ast.unparse(node)}` is no comparison")

    def _has_dtype(self, symbol: str, name: str) -> str:
        tensor = next(one.name for one in self._contract.tensors if one.dtype == symbol)
        dtype = DTYPES[name]
        code = dtype.dlpack if dtype.narrow else _CODES[name.rstrip("0123456789")]
        return f"has_dtype({tensor}, {code}, {dtype.bits}, {dtype.numbers})"

    def _value(self, node: ast.expr, line: int) -> str:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return f"INT64_C({number})"
            case ast.Name(id=name):
                return self._integer(name, line)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                sign = _OPERATORS[type(operator)]
                return f"({self._value(left, line)} {sign} {self._value(right, line)})"
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[a, b], keywords=[]):
                return f"std::{name}<int64_t>({self._value(a, line)}, {self._value(b, line)})"
        raise self.error(
            line, f"`{ast.unparse(node)}` is neither + - * // %, min, max, a name nor a number"
        )

    def _integer(self, name: str, line: int) -> str:
        """A size, a stride or an integer scalar."""
        if name in self._scalars and self._scalars[name].type == "int":
            return name
        for tensor in self._contract.tensors:
            if name in tensor.shape:
                return f"{tensor.name}.size({tensor.shape.index(name)})"
        part = _PART.fullmatch(name)
        tensor_of = self._tensors.get(part["tensor"]) if part else None
        if part is None or tensor_of is None or int(part["axis"]) >= len(tensor_of.shape):
            raise self.error(
                line,
                f"{name} is no tensor, scalar or axis of {self._contract.name}; of a tensor's "
                "axis there are TENSOR_size_0 and TENSOR_stride_0",
            )
        return f"{tensor_of.name}.{part['what']}({part['axis']})"


def _three(parts: list[str]) -> list[str]:
    return [*parts, "1", "1"][:3]


def _without_comments(source: str) -> str:
    """The source with its lines as they were, and nothing in place of comments."""
    blank: Callable[[re.Match[str]], str] = lambda match: "\n" * match[0].count("\n")  # noqa: E731
    return _COMMENT.sub(blank, source)
