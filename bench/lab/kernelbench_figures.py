"""Figures of a public benchmark: what the loop came to on imported problems of KernelBench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from patcher.bench import Candidate, Language, Record, UsageError, write_atomically
from patcher.bench.lab.kernelbench_narrow import ProblemRow, problem_row
from patcher.bench.lab.kernelbench_shares import (
    GainShares,
    ShareSummary,
    gain_shares,
    precision_of,
    read_verdicts,
    summaries,
    times_of,
)
from patcher.bench.lab.loop_runs import (
    UNJUDGED,
    Estimated,
    LoopRow,
    bootstrap_geomean,
    loop_row,
    mean_known,
    mean_of,
    median_of,
    runs_below,
    share_of,
)
from patcher.bench.lab.own_check import OwnCheck, own_check, runs_here
from patcher.integrate.kernelbench.columns import PRECISIONS
from patcher.integrate.kernelbench.model_new import record_of
from patcher.integrate.kernelbench.problem import read_problem, shown
from patcher.runs.run import Run
from patcher.status import attempts

FAST = (1.0, 1.2)
_CHECKS = TypeAdapter(dict[str, OwnCheck])


class ColumnFigures(Record):
    """All runs of one precision."""

    precision: str
    runs: int
    partial: int
    right_by: tuple[Estimated, ...]
    """By iteration: the share of runs with something right until then."""
    geomean: Estimated | None
    """Of speedups over the faster baseline, where something is right; so the next two. The
    interval is the bootstrap's over problems."""
    median: Estimated | None
    mean: Estimated | None
    applied: Estimated | None
    """Geometric mean over all: the baseline stays where nothing is right and faster."""
    narrower: int
    """Runs whose best candidate computes in a narrower type than the column's."""
    in_column: Estimated | None
    """`geomean` of the best candidates that do not."""
    fast: dict[str, tuple[Estimated, ...]]
    """By iteration: shares of runs with something right until then that is faster than so many
    times."""
    judged: int
    refused: int
    """Candidates that the judge ran, and of these the wrong ones."""
    languages: tuple[str, ...]
    models: tuple[str, ...]
    devices: tuple[str, ...]
    sizes: dict[str, int]
    """Runs by the sizes that were timed, in words."""
    tokens: float | None
    input_tokens: float | None
    output_tokens: float | None
    input_characters: float | None
    output_characters: float | None
    judge_s: float | None
    gpu_s: float | None
    usd: float | None
    """Means a kernel."""


class CheckedCandidate(Record):
    """What both checks say of one candidate."""

    run: str
    op: str
    iteration: int
    judge: str
    own: Literal["accepted", "refused", "not run"]
    loose: bool | None
    """Whether KernelBench's code accepts it within 1e-2; None: it was not asked."""
    why: str


class KernelBenchTable(Record):
    so_far: bool
    """Whether loops count that go on."""
    answered_by: str
    """The model, where runs do not know it: prompts and replies were files."""
    columns: tuple[ColumnFigures, ...]
    rows: tuple[ProblemRow, ...]
    shares: tuple[GainShares, ...]
    share_summaries: tuple[ShareSummary, ...]
    checked: tuple[CheckedCandidate, ...]
    passed_over: tuple[str, ...]
    """Runs of other ops, or without a candidate."""


def gather(folder: Path) -> tuple[list[tuple[Run, ProblemRow]], list[str]]:
    """Runs of imported problems with their rows, and the names of others."""
    found, others = list[tuple[Run, ProblemRow]](), list[str]()
    for run in runs_below(folder):
        row = loop_row(run)
        try:
            record_of(row.op if row else "")
        except UsageError:
            others.append(run.id)
            continue
        assert row is not None
        found.append((run, problem_row(run, row)))
    return found, others


def timed_sizes(row: LoopRow) -> str:
    """The points of the row's verdict in words: as shares of the swept size that the problem was
    imported with, if they differ in that alone; else as they are."""
    contract, record = record_of(row.op)
    sweep = contract.sweeps[0]
    points = [dict(pair.split("=") for pair in each.split(",")) for each in row.points]
    if any(set(each) != {sweep.axis, *sweep.fixed} for each in points):
        return "; ".join(row.points)
    shares = [Fraction(int(each[sweep.axis]), max(sweep.values)) for each in points]
    whose = "import's" if record.changed else "file's"
    if shares == [1]:
        return f"the {whose}"
    return f"{', '.join(map(str, sorted(shares, reverse=True)))} of the {whose}"


def column(precision: str, rows: Sequence[ProblemRow], so_far: bool = False) -> ColumnFigures:
    """The figures of one precision; `so_far` counts partial runs as they stand."""
    ended = [row for row in rows if so_far or row.ended is not None]
    speedups = [row.speedup for row in ended if row.speedup is not None]
    kept = [row.in_column for row in ended if row.in_column is not None]
    count, longest = len(ended), max((row.iterations for row in ended), default=0)

    def until(iteration: int) -> Estimated:
        right = sum(row.first_right is not None and row.first_right <= iteration for row in ended)
        return share_of(right, count)

    def faster(bound: float, iteration: int) -> Estimated:
        bests = (row.best_until(iteration) for row in ended)
        return share_of(sum(each is not None and each > bound for each in bests), count)

    iterations = range(1, longest + 1)

    def names(found: Iterable[str | None]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for each in found if each))

    return ColumnFigures(
        precision=precision,
        runs=count,
        partial=sum(row.ended is None for row in rows),
        right_by=tuple(until(each) for each in iterations),
        geomean=bootstrap_geomean(speedups) if speedups else None,
        median=median_of(speedups) if speedups else None,
        mean=mean_of(speedups) if speedups else None,
        applied=bootstrap_geomean([row.gain for row in ended]) if ended else None,
        narrower=sum(row.narrower for row in ended),
        in_column=bootstrap_geomean(kept) if kept else None,
        fast={f"{bound:g}": tuple(faster(bound, each) for each in iterations) for bound in FAST},
        judged=sum(row.judged for row in ended),
        refused=sum(row.refused for row in ended),
        languages=names(row.language for row in ended),
        models=names(model for row in ended for model in row.models),
        devices=names(row.device for row in ended),
        sizes=dict(Counter(timed_sizes(row) for row in ended if row.points)),
        tokens=mean_known(row.tokens for row in ended),
        input_tokens=mean_known(row.input_tokens for row in ended),
        output_tokens=mean_known(row.output_tokens for row in ended),
        input_characters=mean_known(row.input_characters for row in ended),
        output_characters=mean_known(row.output_characters for row in ended),
        judge_s=mean_known(row.judge_s for row in ended),
        gpu_s=mean_known(row.gpu_s for row in ended),
        usd=mean_known(row.usd for row in ended),
    )


def check_all(
    found: Iterable[tuple[Run, ProblemRow]],
    problems: Path,
    kept: Path,
    checkout: Path | None = None,
) -> list[CheckedCandidate]:
    """Run KernelBench's check on every candidate that the judge ran; `kept` has earlier answers.
    With its checkout, answers of another check, or of none, are asked for again."""
    try:
        known = _CHECKS.validate_json(kept.read_bytes()) if kept.is_file() else {}
    except ValidationError as error:
        raise UsageError(f"{kept} is damaged", "move it away, and run the checks again") from error
    files = sorted(problems.rglob("*.py"))
    checked = []
    for run, row in found:
        name = record_of(row.op)[1].file
        for one in attempts(run):
            if one.file is None or one.duplicate_of is not None or one.outcome in UNJUDGED:
                continue
            source = (run.path / one.file).read_bytes().decode()
            candidate = Candidate(op=row.op, language=Language(row.language), source=source)
            key = f"{row.op}/{candidate.digest}"
            before = known.get(key)
            asked = before is not None and (checkout is None or before.by == "kernelbench")
            if before is None or not asked or (before.accepted is None and runs_here(row.language)):
                of_name = [path for path in files if shown(path) == name]
                if len(of_name) > 1:  # of several levels
                    problem = precision_of(row.op)[0]
                    of_name = [
                        each for each in of_name if read_problem(each, 1, {}).name == problem
                    ]
                if len(of_name) != 1:
                    many = len(of_name) or "no"
                    raise UsageError(f"{problems} has {many} {name}", "give the problems' folder")
                known[key] = own_check(candidate, of_name[0], checkout)
                write_atomically(kept, _CHECKS.dump_json(known, indent=1))
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
                    loose=said.loose,
                    why=f"{one.detail}; {said.why}" if said.why else one.detail,
                )
            )
    return checked


def build_table(
    folder: Path,
    problems: Path | None,
    kept: Path,
    so_far: bool = False,
    checkout: Path | None = None,
    answered_by: str = "",
    columns: Path | None = None,
) -> KernelBenchTable:
    """All tables.

    Args:
        folder: of runs.
        problems: folder of the problem files; None: KernelBench's check is not asked.
        kept: file of its earlier answers.
        so_far: whether loops count that go on.
        checkout: KernelBench's repository, whose code checks.
        answered_by: the model, where runs do not know it.
        columns: verdicts of the plan of `kernelbench_columns`.

    Raises:
        UsageError: no run of an imported problem is there, or a problem's file is missing.
    """
    found, others = gather(folder)
    if not found:
        raise UsageError(
            f"no run in {folder} is of an imported problem", "set PATCHER_OPS to the imported ops"
        )
    rows = [row for _, row in found]
    verdicts = read_verdicts(columns) if columns else ()
    shares = gain_shares(times_of(rows, verdicts, so_far))
    by_precision = {
        name: [row for row in rows if precision_of(row.op)[1] == name] for name in PRECISIONS
    }
    return KernelBenchTable(
        so_far=so_far,
        columns=tuple(column(name, own, so_far) for name, own in by_precision.items() if own),
        rows=tuple(rows),
        shares=tuple(shares),
        share_summaries=tuple(summaries(shares)),
        checked=tuple(check_all(found, problems, kept, checkout)) if problems else (),
        answered_by=answered_by,
        passed_over=tuple(others),
    )
