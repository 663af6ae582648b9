"""Figures of a public benchmark: what the loop came to on imported problems of KernelBench."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from patcher.bench import Candidate, Language, Record, UsageError
from patcher.bench.lab.loop_runs import (
    Estimated,
    LoopRow,
    geomean_of,
    loop_row,
    mean_known,
    mean_of,
    median_of,
    runs_below,
    share_of,
)
from patcher.bench.lab.own_check import OwnCheck, own_check
from patcher.integrate.kernelbench.contract import PRECISIONS
from patcher.integrate.kernelbench.model_new import record_of
from patcher.runs.run import Run
from patcher.status import attempts

FAST = (1.0, 1.2)
UNJUDGED = {"generation_failure", "compilation_failure", "compiled"}
"""Outcomes of candidates that neither check can run."""
_CHECKS = TypeAdapter(dict[str, OwnCheck])


class ColumnFigures(Record):
    """All runs of one precision."""

    precision: str
    runs: int
    partial: int
    right_by: tuple[Estimated, ...]
    """By iteration: the share of runs with something right until then."""
    geomean: Estimated | None
    """Of speedups over the faster baseline, where something is right; so the next two."""
    median: Estimated | None
    mean: Estimated | None
    applied: Estimated | None
    """Geometric mean over all: the baseline stays where nothing is right and faster."""
    fast: dict[str, Estimated]
    """Shares of runs that are right and faster than so many times."""
    tokens: float | None
    judge_s: float | None
    gpu_s: float | None
    usd: float | None
    """Means a kernel."""


class GainShares(Record):
    """Where the gain of a problem's best kernel over the fp32 baseline comes from, as logarithms:
    what its baseline gains by the precision alone, and what the kernel gains over that."""

    problem: str
    precision: str
    gain: float
    precision_pct: float
    fusion_pct: float


class CheckedCandidate(Record):
    """What both checks say of one candidate."""

    run: str
    op: str
    iteration: int
    judge: str
    own: Literal["accepted", "refused", "not run"]
    why: str


class KernelBenchTable(Record):
    columns: tuple[ColumnFigures, ...]
    rows: tuple[LoopRow, ...]
    shares: tuple[GainShares, ...]
    checked: tuple[CheckedCandidate, ...]
    passed_over: tuple[str, ...]
    """Runs of other ops, or without a candidate."""


def precision_of(op: str) -> tuple[str, str]:
    """The problem and the precision of an imported op."""
    for name, column in PRECISIONS.items():
        if column.suffix and op.endswith(column.suffix):
            return op.removesuffix(column.suffix), name
    return op, "fp32"


def gather(folder: Path) -> tuple[list[tuple[Run, LoopRow]], list[str]]:
    """Runs of imported problems with their rows, and the names of others."""
    found, others = list[tuple[Run, LoopRow]](), list[str]()
    for run in runs_below(folder):
        row = loop_row(run)
        try:
            record_of(row.op if row else "")
        except UsageError:
            others.append(run.id)
            continue
        assert row is not None
        found.append((run, row))
    return found, others


def column(precision: str, rows: Sequence[LoopRow]) -> ColumnFigures:
    """The figures of one precision."""
    ended = [row for row in rows if row.ended is not None]
    speedups = [row.speedup for row in ended if row.speedup is not None]
    count, longest = len(ended), max((row.iterations for row in ended), default=0)

    def until(iteration: int) -> Estimated:
        right = sum(row.first_right is not None and row.first_right <= iteration for row in ended)
        return share_of(right, count)

    return ColumnFigures(
        precision=precision,
        runs=count,
        partial=len(rows) - count,
        right_by=tuple(until(each) for each in range(1, longest + 1)),
        geomean=geomean_of(speedups) if speedups else None,
        median=median_of(speedups) if speedups else None,
        mean=mean_of(speedups) if speedups else None,
        applied=geomean_of([row.gain for row in ended]) if ended else None,
        fast={
            f"{bound:g}": share_of(sum(each > bound for each in speedups), count) for bound in FAST
        }
        if ended
        else {},
        tokens=mean_known(row.tokens for row in ended),
        judge_s=mean_known(row.judge_s for row in ended),
        gpu_s=mean_known(row.gpu_s for row in ended),
        usd=mean_known(row.usd for row in ended),
    )


def gain_shares(rows: Iterable[LoopRow]) -> list[GainShares]:
    """For each problem with an ended fp32 run, of the best kernel of each precision. Only times of
    the same points on the same device are held against each other."""
    best: dict[str, dict[str, LoopRow]] = {}
    for row in rows:
        problem, precision = precision_of(row.op)
        known = best.setdefault(problem, {})
        if row.ended is not None and row.speedup is not None:
            before = known.get(precision)
            if before is None or (before.speedup or 0) < row.speedup:
                known[precision] = row
    found = []
    for problem, known in best.items():
        plain = known.get("fp32")
        for precision, row in known.items():
            if plain is None or (row.points, row.device) != (plain.points, plain.device):
                continue
            assert plain.baseline_us
            assert row.baseline_us
            assert row.candidate_us
            whole = math.log(plain.baseline_us / row.candidate_us)
            share = 100 * math.log(plain.baseline_us / row.baseline_us) / whole if whole else 0.0
            found.append(
                GainShares(
                    problem=problem,
                    precision=precision,
                    gain=math.exp(whole),
                    precision_pct=share,
                    fusion_pct=100 - share,
                )
            )
    return found


def check_all(
    found: Iterable[tuple[Run, LoopRow]], problems: Path, kept: Path
) -> list[CheckedCandidate]:
    """Run KernelBench's check on every candidate that the judge ran; `kept` has earlier answers."""
    known = _CHECKS.validate_json(kept.read_bytes()) if kept.is_file() else {}
    files = {path.name: path for path in sorted(problems.rglob("*.py"))}
    checked = []
    for run, row in found:
        name = record_of(row.op)[1].file
        for one in attempts(run):
            if one.file is None or one.duplicate_of is not None or one.outcome in UNJUDGED:
                continue
            source = (run.path / one.file).read_bytes().decode()
            candidate = Candidate(op=row.op, language=Language(row.language), source=source)
            key = f"{row.op}/{candidate.digest}"
            if key not in known:
                if name not in files:
                    raise UsageError(f"{problems} has no {name}", "give the folder of the problems")
                known[key] = own_check(candidate, files[name])
                kept.write_bytes(_CHECKS.dump_json(known, indent=1))
            said = known[key]
            own: dict[bool | None, Literal["accepted", "refused", "not run"]] = {
                True: "accepted",
                False: "refused",
                None: "not run",
            }
            checked.append(
                CheckedCandidate(
                    run=run.id,
                    op=row.op,
                    iteration=one.iteration,
                    judge="right" if one.geomean_speedup is not None else one.outcome.value,
                    own=own[said.accepted],
                    why=f"{one.detail}; {said.why}" if said.why else one.detail,
                )
            )
    return checked


def build_table(folder: Path, problems: Path | None, kept: Path) -> KernelBenchTable:
    """Raises:
    UsageError: no run of an imported problem is there, or a problem's file is missing.
    """
    found, others = gather(folder)
    if not found:
        raise UsageError(
            f"no run in {folder} is of an imported problem", "set PATCHER_OPS to the imported ops"
        )
    rows = [row for _, row in found]
    by_precision = {
        name: [row for row in rows if precision_of(row.op)[1] == name] for name in PRECISIONS
    }
    return KernelBenchTable(
        columns=tuple(column(name, own) for name, own in by_precision.items() if own),
        rows=tuple(rows),
        shares=tuple(gain_shares(rows)),
        checked=tuple(check_all(found, problems, kept)) if problems else (),
        passed_over=tuple(others),
    )
