"""Candidates that compute in a narrower type than their column says, such as float16 for TF32.

The judge holds a candidate to the error of its column's arithmetic, which scaled float16 can keep:
it has as many bits of significand as TF32, and twice the rate. So such a kernel is right, and its
gain is not the column's. It is told by what its source names, without comments and docstrings.
"""

from __future__ import annotations

import ast
import re

from patcher.bench import Language
from patcher.bench.lab.kernelbench_shares import precision_of
from patcher.bench.lab.loop_runs import LoopRow
from patcher.runs.run import Run
from patcher.status import attempts

_EIGHT_BITS = r"float8|fp8|e4m3|e5m2"
_SIXTEEN_BITS = r"b?float16|b?fp16|\bbf16|_bf16|\bhalf\b|__half|__nv_bfloat16|\.b?f16"
_NARROWER = {
    precision: re.compile(
        _EIGHT_BITS if precision in ("bf16", "fp16") else f"{_EIGHT_BITS}|{_SIXTEEN_BITS}"
    )
    for precision in ("fp32", "tf32", "bf16", "fp16")
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class ProblemRow(LoopRow):
    """One run of the loop on an imported problem."""

    narrower: bool
    """Whether its best candidate names a type that is narrower than its column's."""
    in_column: float | None
    """Speedup of the best right candidate that names none; None: there is none."""


def problem_row(run: Run, row: LoopRow) -> ProblemRow:
    """The row, with what its candidates compute in."""
    right = {
        one.geomean_speedup: names_narrower(
            (run.path / one.file).read_bytes().decode(), row.op, Language(row.language)
        )
        for one in attempts(run)
        if one.file is not None and one.geomean_speedup is not None
    }
    return ProblemRow(
        **dict(row),
        narrower=bool(right) and right[max(right)],
        in_column=max((speedup for speedup, narrow in right.items() if not narrow), default=None),
    )


def names_narrower(source: str, op: str, language: Language) -> bool:
    """Whether a source names a type that is narrower than its column's arithmetic."""
    code = _python_code(source) if language.in_python else _COMMENT.sub(" ", source)
    return _NARROWER[precision_of(op)[1]].search(code) is not None


def _python_code(source: str) -> str:
    """Without comments and strings that stand alone; inline assembly stays."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not _is_text(one)]
            body[:] = kept or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
