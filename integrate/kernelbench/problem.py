"""A KernelBench problem file: its sizes by name, and its trace as data, which `tracing.py` makes.

The file is a stranger's code, and here it is only parsed. Nobody vouches for its trace:
`ProblemTrace` checks each field, and `written.py` writes the reference anew from a list of
operators that only compute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from patcher.bench import Record, read_source
from patcher.integrate.formats.foreign_contract import Refused
from patcher.integrate.kernelbench.names import identifier

SMALLEST = 16
"""A scaled size is at least this; smaller sizes (kernel widths, groups) stay as they are."""
_LEVELS = 60
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Target = Annotated[str, Field(pattern=r"^[\w.+-]{1,200}$")]
"""A name in the module. It stands in the op's texts, which models read."""
Size = Annotated[str, Field(pattern=r"^[A-Za-z0-9_+\-*/() ]{1,300}$")]


class TracedTensor(Record):
    """A tensor that the graph reads."""

    node: Name
    kind: Literal["input", "parameter", "buffer", "constant"]
    """A constant is no part of the module's state, such as a number in its `forward`."""
    name: Target
    target: Target
    dtype: str
    shape: tuple[Size, ...]
    drawn: Literal["constant", "uniform", "normal", "integers", "table"]
    """How the file fills it, by its values."""
    low: Annotated[float, Field(allow_inf_nan=False)]
    """The constant, the smallest value, or the mean."""
    high: Annotated[float, Field(allow_inf_nan=False)]
    """The largest value, or the standard deviation."""
    triangle: Literal["", "triu", "tril", "triu1", "tril1"] = ""
    """Of matrices that are zero but for a triangle; the numbers above are of that."""
    table: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """Its own bytes, compressed, in base64."""


class TracedStep(Record):
    """One operator of the graph."""

    node: Name
    target: str
    arguments: tuple[Any, ...]
    keywords: dict[Name, Any]


class TracedOutput(Record):
    node: Name
    dtype: str
    shape: tuple[Size, ...]


class FreeSize(Record):
    """A size that the module leaves free."""

    least: Annotated[int, Field(ge=0, le=1 << 40)]
    most: Annotated[int, Field(ge=1, le=1 << 40)] | None
    size: Annotated[int, Field(ge=1, le=1 << 40)]
    """In the file."""
    multiple: Annotated[int, Field(ge=1, le=1 << 40)] = 1
    """Of which other sizes are multiples."""


class ProblemTrace(Record):
    """What the sandbox made of a problem."""

    init: tuple[Any, ...]
    keywords: dict[Name, Any]
    tensors: tuple[TracedTensor, ...]
    arguments: tuple[dict[str, Any], ...]
    """The arguments of `forward`: `{"tensor": NAME}` or `{"value": LITERAL}`."""
    steps: Annotated[tuple[TracedStep, ...], Field(max_length=2000)]
    outputs: Annotated[tuple[TracedOutput, ...], Field(min_length=1, max_length=64)]
    result: Any = None
    """How the result holds them: see `results.py`."""
    symbols: dict[Name, FreeSize]
    sums: tuple[Size, ...]
    flops: tuple[str, ...]
    notes: Annotated[tuple[str, ...], Field(max_length=20)]
    sizes: tuple[dict[Name, int], ...]
    """Other sizes at which the module and the graph agree."""

    @model_validator(mode="before")
    @classmethod
    def _shallow(cls, document: Any) -> Any:
        level = [document]
        for _ in range(_LEVELS):
            level = [
                inside
                for each in level
                if isinstance(each, dict | list | tuple)
                for inside in (each.values() if isinstance(each, dict) else each)
            ]
        if level:
            raise ValueError("it is nested too deeply")
        return document


class Problem(Record):
    """A problem file as it is traced."""

    name: Name
    """Name of the op."""
    file: str
    source: str
    """Its text, with the changed sizes."""
    changed: dict[str, str]
    """Sizes that differ from the file's, by name: `1024 -> 64`."""
    origin: str = "KernelBench"
    """Who wrote it."""
    axes: dict[Name, tuple[str, ...]] = Field(default_factory=dict)
    """What each size of its inputs is, where it says so: the name of an axis, or arithmetic over
    such names; empty for a size that is fixed."""
    outputs: dict[Name, str] = Field(default_factory=dict)
    """Dtypes of its results by name, where it has such."""
    shapes: dict[Name, tuple[str, ...]] = Field(default_factory=dict)
    """Of its inputs and results, by its own names of axes."""
    workloads: tuple[dict[str, int], ...] = ()
    """Sizes by these names, where it comes with such; else its own sizes are timed."""


def is_problem(text: str) -> bool:
    """Whether a Python text has the form of a KernelBench problem."""
    return {"Model", "get_inputs", "get_init_inputs"} <= defined_names(text)


def may_be_problem(path: Path) -> bool:
    """Whether a file is a problem, or names a problem's parts and is no Python in UTF-8."""
    try:
        text = read_source(path).removeprefix("\ufeff")
    except UnicodeDecodeError:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return False
    if is_problem(text):
        return True
    named = all(each in text for each in ("Model", "get_inputs", "get_init_inputs"))
    try:
        _parsed(path)
    except Refused:
        return named
    return False


def is_model_new(text: str) -> bool:
    """Whether a Python text is a KernelBench candidate."""
    return "ModelNew" in defined_names(text)


def defined_names(text: str) -> set[str]:
    """Classes and functions that a Python text defines; none of a text that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {each.name for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}


def read_problem(path: Path, scale: int, sizes: dict[str, int]) -> Problem:
    """Read a problem and change its top-level sizes.

    Args:
        path: the file.
        scale: divides every top-level integer that stays at least `SMALLEST`.
        sizes: other values of top-level names; those that the file lacks are ignored.

    Raises:
        Refused: it is no Python in UTF-8.
    """
    text, tree = _parsed(path)
    changed: dict[str, str] = {}
    for name, value, put in assigned(tree):
        before, new = ast.unparse(value), value
        if name in sizes:
            new = ast.Constant(sizes[name])
        elif scale > 1:
            new = _Scaled(scale).visit(value)
        put(new)
        if (after := ast.unparse(new)) != before:
            changed[name] = f"{before} -> {after}"
    stem = re.sub(r"\W", "_", path.stem, flags=re.ASCII).strip("_").lower()
    if not stem[:1].isalpha():
        folder = re.sub(r"\W", "_", path.resolve().parent.name, flags=re.ASCII).lower()
        stem = f"{folder if folder[:1].isalpha() else 'problem'}_{stem}"
    source = ast.unparse(ast.fix_missing_locations(tree)) if changed else text
    name = identifier(stem[:80], set())
    return Problem(name=name, file=shown(path), source=source, changed=changed)


def size_names(path: Path) -> list[str]:
    """The names that a problem file gives values to at its top level."""
    try:
        return [name for name, _, _ in assigned(_parsed(path)[1])]
    except Refused:
        return []


def _parsed(path: Path) -> tuple[str, ast.Module]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return text, ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"it is no Python in UTF-8: {plain(str(error))}") from error


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr, Callable[[ast.expr], None]]]:
    """Names at the top level, each with its value and what puts another one there."""
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name), *_], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                yield name, value, partial(setattr, statement, "value")
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                if len(names) == len(values):
                    for index, target in enumerate(names):
                        if isinstance(target, ast.Name):
                            yield target.id, values[index], partial(values.__setitem__, index)


def shown(path: Path) -> str:
    """A file's name as generated texts hold it: no quote, no line break."""
    return re.sub(r"[^\w.+-]", "_", path.name, flags=re.ASCII)


class _Scaled(ast.NodeTransformer):
    """Divides integers by a scale."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if type(node.value) is int and node.value // self.scale >= SMALLEST:
            return ast.Constant(node.value // self.scale)
        return node


def plain(text: str) -> str:
    """A stranger's text on one line, of printable characters, cut to 400."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[:400]


def literal(value: Any) -> str:
    """A JSON literal of a trace as Python source: numbers, text, None, lists and tuples.

    Raises:
        Refused: it is none.
    """
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    match value:
        case {"float": str(text)}:
            return _number(text)
        case {"list": list(items)}:
            return f"[{', '.join(map(literal, items))}]"
        case {"tuple": list(items)}:
            inside = ", ".join(map(literal, items))
            return f"({inside},)" if len(items) == 1 else f"({inside})"
    raise Refused("its trace holds a value that is no literal")


def _number(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        raise Refused("its trace holds a number that is none") from None
    return repr(number) if number - number == 0 else f'float("{number}")'
