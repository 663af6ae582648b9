"""The table of a public benchmark: what the loop came to on imported problems of KernelBench.

`python -m patcher.bench.lab.kernelbench_table RUNS --out FOLDER [--problems FOLDER]` reads every
run of `patcher optimize` below `RUNS` whose op was imported, and writes `table.md` and
`table.json`. With `--problems`, the folder of the problem files, KernelBench's own check is run on
every candidate, in the sandbox; what it says is kept in `own-checks.json`. `PATCHER_OPS` names the
folder of the imported ops.

Columns of precision are never mixed. A partial run is counted as such, and is no figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from patcher.bench import PatcherError
from patcher.bench.lab.kernelbench_figures import (
    FAST,
    CheckedCandidate,
    KernelBenchTable,
    build_table,
)
from patcher.bench.lab.loop_runs import Estimated

PUBLISHED = (
    "KForge (arXiv 2606.02963): 37 problems of Level 2, five iterations, Arc B580, over the faster "
    "of eager and torch.compile: geomean 5.13.",
    "CudaForge (arXiv 2511.01884): 97.6 % right, mean 1.68, median 1.11, $0.30 and 26.5 minutes a "
    "kernel.",
)


def markdown(table: KernelBenchTable) -> str:
    """The tables for people."""
    names = [column.precision for column in table.columns]
    lines = ["Means, medians and shares with 95 % intervals.", "", _line("", *names), _rule(names)]
    most = max((len(each.right_by) for each in table.columns), default=0)
    lines.append(_line("runs (partial)", *(f"{c.runs} ({c.partial})" for c in table.columns)))
    for at in range(most):
        cells = (str(c.right_by[at]) if at < len(c.right_by) else "" for c in table.columns)
        lines.append(_line(f"right by iteration {at + 1}", *cells))
    for what, name in (
        ("speedup where right, geomean", "geomean"),
        ("median", "median"),
        ("mean", "mean"),
        ("over all, 1 where none is faster", "applied"),
    ):
        lines.append(_line(what, *(_shown(getattr(c, name)) for c in table.columns)))
    for bound in FAST:
        cells = (_shown(c.fast.get(f"{bound:g}")) for c in table.columns)
        lines.append(_line(f"fast@{bound:g}", *cells))
    for what, name in (
        ("tokens a kernel", "tokens"),
        ("judge seconds a kernel", "judge_s"),
        ("GPU seconds a kernel", "gpu_s"),
        ("$ a kernel", "usd"),
    ):
        lines.append(_line(what, *(_shown(getattr(c, name)) for c in table.columns)))
    lines += ["", *(f"Published: {each}" for each in PUBLISHED), ""]
    head = ("op", "faster baseline", "us", "kernel us", "speedup", "right at", "outcomes", "ended")
    lines += [_line(*head), _rule(head[1:])]
    for row in table.rows:
        without = f" (without {', '.join(row.missing_baselines)})" if row.missing_baselines else ""
        known = Estimated(value=row.speedup, low=row.low, high=row.high) if row.speedup else None
        lines.append(
            _line(
                row.op,
                (row.baseline or "") + without,
                _shown(row.baseline_us),
                _shown(row.candidate_us),
                _shown(known),
                _shown(row.first_right),
                ", ".join(row.outcomes),
                row.ended or "**partial**",
            )
        )
    if table.shares:
        shares = ("problem", "kernel in", "gain over fp32", "by precision", "by the kernel")
        lines += ["", _line(*shares), _rule(shares[1:])]
        lines += [
            _line(
                each.problem,
                each.precision,
                f"{each.gain:.3g}",
                f"{each.precision_pct:.0f} %",
                f"{each.fusion_pct:.0f} %",
            )
            for each in table.shares
        ]
    if table.checked:
        lines += ["", *_checks(table.checked)]
    return "\n".join(lines) + "\n"


def _checks(checked: Sequence[CheckedCandidate]) -> list[str]:
    """Both checks against each other, and each candidate of which they say different things."""
    owns = ("accepted", "refused", "not run")
    lines = [_line("judge \\ KernelBench's own check", *owns), _rule(owns)]
    for judge in ("right", "refused"):
        of = [each for each in checked if (each.judge == "right") == (judge == "right")]
        lines.append(_line(judge, *(str(sum(each.own == own for each in of)) for own in owns)))
    lines.append("")
    for each in checked:
        if (each.judge == "right", each.own) in ((False, "accepted"), (True, "refused")):
            lines.append(f"- {each.op}, iteration {each.iteration}: {each.judge}; {each.why}")
        elif each.own == "not run":
            lines.append(f"- {each.op}, iteration {each.iteration}: not run; {each.why}")
    return lines


def _shown(value: Estimated | float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, Estimated) else f"{value:,.4g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: Sequence[str]) -> str:
    return f"| --- |{' ---: |' * len(columns)}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.kernelbench_table")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=Path, help="folder of the problem files")
    given = parser.parse_args(words)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        table = build_table(given.runs, given.problems, given.out / "own-checks.json")
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    text = markdown(table)
    (given.out / "table.md").write_text(text, encoding="utf-8")
    document = json.dumps(table.model_dump(mode="json"), indent=1) + "\n"
    (given.out / "table.json").write_text(document, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
