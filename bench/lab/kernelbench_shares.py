"""Which part of a gain over the fp32 baseline is precision, and which the kernel's fusion.

A kernel's gain is a product: what the baseline gains by the precision alone, times what the kernel
gains over that baseline. Shares are of logarithms. They depend on the order, so the other one is
given, too, where the kernel also exists in full float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from patcher.bench import Evaluation, Record, UsageError
from patcher.bench.judge.evaluation import geomean
from patcher.bench.lab.loop_runs import Estimated, LoopRow, bootstrap_geomean, points_of
from patcher.bench.records import content
from patcher.integrate.kernelbench.columns import PRECISIONS

PLAIN = "fp32"
MODULE, KERNEL = "module", "kernel"


class GainShares(Record):
    """Where the gain of a problem's kernel over the fp32 baseline comes from."""

    problem: str
    precision: str
    gain: float
    by_precision: float
    by_kernel: float
    """Factors of the gain."""
    precision_pct: float
    fusion_pct: float
    fusion_first_pct: float | None
    """The kernel's share if it comes first, in full float32, and the precision after it."""


class ShareSummary(Record):
    """Geometric means over the problems of one precision."""

    precision: str
    problems: int
    gain: Estimated
    by_precision: Estimated
    by_kernel: Estimated


@dataclass(frozen=True)
class ColumnTimes:
    """Times of one problem in one precision, in microseconds, geometric means over its points."""

    baseline_us: float
    kernel_us: float | None
    points: tuple[str, ...]
    device: str | None


def precision_of(op: str) -> tuple[str, str]:
    """The problem and the precision of an imported op."""
    for name, column in PRECISIONS.items():
        if column.suffix and op.endswith(column.suffix):
            return op.removesuffix(column.suffix), name
    return op, PLAIN


Known = dict[str, dict[str, ColumnTimes]]


def times_of(
    rows: Iterable[LoopRow], verdicts: Iterable[tuple[str, Evaluation]], so_far: bool = False
) -> Known:
    """By problem and precision the fastest kernel's times. A loop's own kernel counts before one
    of another column that was judged there, and a module's verdict has the baseline alone.

    Args:
        verdicts: what was judged (`module`, `kernel`), and its verdict.
    """
    known: Known = {}
    for row in rows:
        if (row.ended is None and not so_far) or row.speedup is None:
            continue
        assert row.baseline_us
        assert row.candidate_us
        times = ColumnTimes(row.baseline_us, row.candidate_us, row.points, row.device)
        problem, precision = precision_of(row.op)
        before = known.setdefault(problem, {}).get(precision)
        if before is None or row.candidate_us < (before.kernel_us or math.inf):
            known[problem][precision] = times
    for what, verdict in sorted(verdicts, key=lambda each: each[0] != KERNEL):
        if not verdict.right or not verdict.timings:
            continue
        problem, precision = precision_of(verdict.op)
        found = known.setdefault(problem, {})
        if precision not in found:
            found[precision] = ColumnTimes(
                geomean([each.baseline_us for each in verdict.timings]),
                geomean([each.candidate_us for each in verdict.timings])
                if what == KERNEL
                else None,
                points_of(verdict.timings),
                verdict.environment.device if verdict.environment else None,
            )
    return known


def gain_shares(known: Mapping[str, Mapping[str, ColumnTimes]]) -> list[GainShares]:
    """For each problem whose fp32 baseline was timed, of the kernel of each precision. Only times
    of the same points on the same device are held against each other."""
    found = []
    for problem, columns in known.items():
        plain = columns.get(PLAIN)
        for precision, times in columns.items():
            if plain is None or times.kernel_us is None:
                continue
            if (times.points, times.device) != (plain.points, plain.device):
                continue
            whole = math.log(plain.baseline_us / times.kernel_us)
            by_precision = plain.baseline_us / times.baseline_us
            share = 100 * math.log(by_precision) / whole if whole else 0.0
            first = None
            if plain.kernel_us is not None and whole:
                first = 100 * math.log(plain.baseline_us / plain.kernel_us) / whole
            found.append(
                GainShares(
                    problem=problem,
                    precision=precision,
                    gain=math.exp(whole),
                    by_precision=by_precision,
                    by_kernel=times.baseline_us / times.kernel_us,
                    precision_pct=share,
                    fusion_pct=100 - share,
                    fusion_first_pct=first,
                )
            )
    return found


def summaries(shares: Sequence[GainShares]) -> list[ShareSummary]:
    """A row a precision."""
    return [
        ShareSummary(
            precision=precision,
            problems=len(own),
            gain=bootstrap_geomean([each.gain for each in own]),
            by_precision=bootstrap_geomean([each.by_precision for each in own]),
            by_kernel=bootstrap_geomean([each.by_kernel for each in own]),
        )
        for precision in PRECISIONS
        if (own := [each for each in shares if each.precision == precision])
    ]


def read_verdicts(folder: Path) -> list[tuple[str, Evaluation]]:
    """The verdicts that the plan of `kernelbench_columns` left in a folder.

    Raises:
        UsageError: there is none, or a file holds none.
    """
    found = []
    for what in (MODULE, KERNEL):
        for path in sorted(folder.glob(f"*-{what}.json")):
            try:
                found.append((what, Evaluation.model_validate_json(content(path))))
            except (OSError, ValidationError) as error:
                raise UsageError(
                    f"{path} holds no verdict", "run its job again: see columns.toml"
                ) from error
    if not found:
        raise UsageError(f"{folder} holds no verdict", "run the plan of kernelbench_columns first")
    return found
