"""Parts of Python files as text: the code of functions and classes by name, without an import.

So an installed engine and an unpacked wheel read alike, and what patches replaced in memory does
not matter. A digest is of the syntax tree: comments, docstrings and layout do not count. It does
not depend on the version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ABSENT = "absent"
"""The digest of a part that a version does not have."""
_NOT_CODE = ("ctx", "kind", "type_comment", "type_ignores")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Statement:
    """One simple statement, or the head of a compound one."""

    digest: str
    line: int
    """Line of the file, from 1."""
    text: str


@dataclass(frozen=True)
class Part:
    """A function, method or class of the engine."""

    digest: str
    text: str = ""
    """Its source text, with decorators; "" if it is absent."""
    statements: tuple[Statement, ...] = ()


def read_part(file: Path, path: str) -> Part:
    """A part of a file by its `attribute.attribute`; its digest is `ABSENT` if there is none.

    Definitions under a condition count; where several have the name, all of them are the part.
    """
    source, tree = _parsed(file, file.stat().st_mtime_ns)
    nodes: list[ast.AST] = [tree]
    for attribute in path.split("."):
        nodes = [found for node in nodes for found in _definitions(node, attribute)]
    if not nodes:
        return Part(ABSENT)
    return Part(
        _sha([_form(node) for node in nodes])[:16],
        "\n".join(_text(source, node) for node in nodes) + "\n",
        tuple(found for node in nodes for found in _statements(source, node)),
    )


def class_digests(file: Path, ending: str) -> list[tuple[str, str]]:
    """The classes of a file whose names end so, each with the digest of its code, in which neither
    that name nor its decorators count."""
    _, tree = _parsed(file, file.stat().st_mtime_ns)
    return [
        (node.name, _sha(_form(node, ("name", "decorator_list")))[:16])
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith(ending)
    ]


def definitions(file: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """The functions of a file, and the methods of its classes (`Class.method`), each with its
    syntax and the digest of its code, in which neither its name nor its decorators count."""
    _, tree = _parsed(file, file.stat().st_mtime_ns)
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, ast.FunctionDef):
                digest = _sha(_form(each, ("name", "decorator_list", "returns")))[:16]
                yield f"{before}{each.name}", each, digest


def chosen_classes(file: Path) -> set[str]:
    """The names that a file uses under a condition alone, as in `A() if setting else B()`.

    A name's own definition, bases of classes and questions for a type (`isinstance`) are no use.
    """
    _, tree = _parsed(file, file.stat().st_mtime_ns)
    used: dict[bool, set[str]] = {True: set(), False: set()}

    def visit(node: ast.AST, chosen: bool) -> None:
        if isinstance(node, ast.Name):
            used[chosen].add(node.id)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            return
        of_condition = isinstance(node, ast.If | ast.IfExp)
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.ClassDef) and field == "bases":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, chosen or (of_condition and field != "test"))

    visit(tree, False)
    return used[True] - used[False]


@lru_cache(maxsize=64)
def _parsed(file: Path, changed_ns: int) -> tuple[list[str], ast.Module]:
    """The lines and the syntax tree of a file; the time of its change tells it from an older."""
    source = file.read_text(encoding="utf-8")
    return source.splitlines(), ast.parse(source)


def _definitions(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Functions and classes of that name in a module or class, under conditions, too."""
    for child in _children(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == name:
                yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _definitions(child, name)


def _children(node: ast.AST) -> Iterator[Any]:
    for block in _BLOCKS:
        yield from getattr(node, block, ())


def _is_remark(node: Any) -> bool:
    """Whether a statement is a string: a docstring, also that of an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _form(node: Any, without: tuple[str, ...] = ()) -> Any:
    """The syntax below a node as nested tuples; what is empty in one Python is left out in all."""
    if isinstance(node, list):
        return tuple(_form(item) for item in node if not _is_remark(item))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        (name, _form(value))
        for name, value in ast.iter_fields(node)
        if name not in _NOT_CODE and name not in without and value is not None and value != []
    ]
    return type(node).__name__, *sorted(fields)


def _statements(source: list[str], node: ast.AST) -> Iterator[Statement]:
    """Every statement below a node, with itself first."""
    if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not _is_remark(node):
        line = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
        head = "\n".join(_head(source, node, line))
        yield Statement(_sha(_form(node, _BLOCKS))[:6], line, head)
    for child in _children(node):
        yield from _statements(source, child)


def _head(source: list[str], node: Any, first: int) -> list[str]:
    """The lines of a statement; of a compound one, those before its first block."""
    inner = [child.lineno for child in _children(node) if hasattr(child, "lineno")]
    last = max(min(inner) - 1, first) if inner else getattr(node, "end_lineno", first)
    return source[first - 1 : last]


def _text(source: list[str], node: Any) -> str:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(source[first - 1 : node.end_lineno])


def _sha(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
