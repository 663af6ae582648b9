"""Candidates that compute in a narrower type than their column says, such as float16 for TF32.

The judge holds a candidate to the error of its column's arithmetic, which scaled float16 can keep:
it has as many bits of significand as TF32, and twice the rate. So such a kernel is right, and its
gain is not the column's. It is told by what its source names, without comments and docstrings.
"""

from __future__ import annotations

import re

from patcher.bench import Language
from patcher.bench.judge.stripping import views
from patcher.bench.lab.kernelbench_shares import precision_of
from patcher.bench.lab.loop_runs import LoopRow
from patcher.integrate.kernelbench.columns import PRECISIONS
from patcher.runs.run import Run
from patcher.status import attempts

_UNDER_16_BITS = r"float8|fp8|e4m3|e5m2"
_UNDER_32_BITS = rf"{_UNDER_16_BITS}|float16|fp16|\bbf16|_bf16|\bhalf\b|__half|\.b?f16"


class ProblemRow(LoopRow):
    """One run of the loop on an imported problem."""

    narrower: bool
    """Whether its best candidate names a type that is narrower than its column's."""
    in_column: float | None
    """Speedup of the best right candidate that names none; None: there is none."""


def problem_row(run: Run, row: LoopRow) -> ProblemRow:
    """The row, with what its candidates compute in."""
    right = [
        (one.geomean_speedup, (run.path / one.file).read_bytes().decode())
        for one in attempts(run)
        if one.file is not None and one.geomean_speedup is not None
    ]
    language = Language(row.language)
    kept = [speedup for speedup, text in right if not names_narrower(text, row.op, language)]
    best = max((speedup for speedup, _ in right), default=None)
    return ProblemRow(
        **dict(row),
        narrower=best is not None and best not in kept,
        in_column=max(kept, default=None),
    )


def names_narrower(source: str, op: str, language: Language) -> bool:
    """Whether a source names a type that is narrower than its column's arithmetic."""
    column = PRECISIONS[precision_of(op)[1]]
    names = _UNDER_32_BITS if column.number == "float32" else _UNDER_16_BITS
    return re.search(names, views(source, language).text) is not None
