"""A candidate's text and a problem's in one file, where neither changes the other's names; and how
it is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from patcher.bench import SCHEMA_VERSION, Record, UsageError

_LEFT = ("get_inputs", "get_init_inputs")


def joined(source: str, problem: str) -> str:
    """A file of the candidate's text and `_problem`, which gives the problem's `Model`.

    Raises:
        UsageError: the source is no Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"the source is no Python: {error}", "give a source that runs") from error
    lines = source.split("\n")
    for each in filter(_is_future, tree.body):
        lines[each.lineno - 1 : each.end_lineno] = [""] * len(
            lines[each.lineno - 1 : each.end_lineno]
        )
    source, name = "\n".join(lines).strip("\n"), "_ModelNew"
    while re.search(rf"\b{name}\b", source):
        name = f"_{name}"
    source = re.sub(r"\bModelNew\b", name, source)
    kept = ast.parse(problem).body
    future = [each for each in (*tree.body, *kept) if _is_future(each)][:1]
    [function] = ast.parse("def _problem():\n    return Model").body
    assert isinstance(function, ast.FunctionDef)
    function.body[:0] = [
        each
        for each in kept
        if not _is_future(each) and not (isinstance(each, ast.FunctionDef) and each.name in _LEFT)
    ]
    text = ast.unparse(ast.Module([function], type_ignores=[]))
    return "\n".join([*map(ast.unparse, future), "import torch", source, "", "", text])


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


class AnswerFile(Record):
    """The result of an export of a candidate as an answer to a problem."""

    schema_version: int = SCHEMA_VERSION
    path: str
    """The file that was written."""
    op: str
    digest: str
    """Digest of the candidate: language and source."""


def written_file(out: Path, text: str) -> None:
    """Write a new file.

    Raises:
        UsageError: there is one, or none can be written.
    """
    if out.exists():
        raise UsageError(f"{out} exists", "choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}", "choose another --out") from error
