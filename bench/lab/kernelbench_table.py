"""The table of a public benchmark: what the loop came to on imported problems of KernelBench.

`python -m patcher.bench.lab.kernelbench_table RUNS --out FOLDER [--problems FOLDER]` reads every
run of `patcher optimize` below `RUNS` whose op was imported, and writes `README.md` and
`table.json`. With `--problems`, the folder of the problem files, KernelBench's own check is run on
every candidate, in the sandbox; what it says is kept in `own-checks.json`. `PATCHER_OPS` names the
folder of the imported ops.

Columns of precision are never mixed. A partial run is counted as such, and is no figure, unless
`--so-far` says to count each loop as it stands: then the page says so, and is no result.

With `--kernelbench CHECKOUT`, on a GPU, the check is KernelBench's own code from that folder, at
its own tolerance and at 1e-2. It compares in float32 with TF32 off, so that it refuses kernels that
the other columns allow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from patcher.bench import PatcherError, write_atomically
from patcher.bench.lab.kernelbench_figures import (
    FAST,
    CheckedCandidate,
    KernelBenchTable,
    build_table,
)
from patcher.bench.lab.kernelbench_published import beside
from patcher.bench.lab.loop_runs import Estimated, LoopRow
from patcher.bench.lab.own_check import package_of

TITLE = "# KernelBench through the loop"
SO_FAR = "**Loops that go on count as they stand: this is no result.**"
NOTE = (
    "Means, medians and shares with 95 % intervals: of geometric means the bootstrap's over "
    "problems, of shares Wilson's. The judge refuses what it ran and found wrong. A candidate is "
    "held to the error of its column's arithmetic; some keep it in a narrower type, such as "
    "float16 for TF32."
)
PER_KERNEL = (
    ("tokens a kernel, at most", "tokens"),
    ("tokens in, as counted", "input_tokens"),
    ("tokens out, as counted", "output_tokens"),
    ("characters in", "input_characters"),
    ("characters out, without thinking", "output_characters"),
    ("judge seconds a kernel", "judge_s"),
    ("GPU seconds a kernel", "gpu_s"),
    ("$ a kernel", "usd"),
)


def markdown(table: KernelBenchTable) -> str:
    """The tables for people."""
    names = [column.precision for column in table.columns]
    lines = [
        TITLE,
        "",
        *([SO_FAR, ""] if table.so_far else []),
        *beside(table.columns, table.answered_by),
        "",
    ]
    lines += [NOTE, "", _line("", *names), _rule(names)]
    lines.append(_line("runs (partial)", *(f"{c.runs} ({c.partial})" for c in table.columns)))
    narrower = (str(c.narrower) for c in table.columns)
    lines.append(_line("whose best computes in a narrower type", *narrower))
    judged = (f"{c.refused} of {c.judged}" for c in table.columns)
    lines.append(_line("candidates refused", *judged))
    lines += _by_iteration("right by iteration", [c.right_by for c in table.columns])
    for bound in FAST:
        faster = [c.fast.get(f"{bound:g}", ()) for c in table.columns]
        lines += _by_iteration(f"fast@{bound:g} by iteration", faster)
    for what, name in (
        ("speedup where right, geomean", "geomean"),
        ("median", "median"),
        ("mean", "mean"),
        ("over all, 1 where none is faster", "applied"),
        ("geomean without narrower types", "in_column"),
    ):
        lines.append(_line(what, *(_shown(getattr(c, name)) for c in table.columns)))
    for what, name in PER_KERNEL:
        lines.append(_line(what, *(_shown(getattr(c, name)) for c in table.columns)))
    head = (
        *("op", "faster baseline", "us", "kernel us", "speedup", "without narrower types"),
        *("right at", "refused", "tokens in, out", "GPU s", "outcomes", "ended"),
    )
    lines += ["", _line(*head), _rule(head[1:])]
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
                _shown(row.in_column) if row.narrower else "",
                _shown(row.first_right),
                str(row.refused),
                _counts(row),
                f"{row.gpu_s:.0f}",
                ", ".join(row.outcomes),
                row.ended or "**partial**",
            )
        )
    for sum_ in table.share_summaries:
        lines += [
            "",
            f"Over the fp32 baseline, {sum_.problems} kernels in {sum_.precision}: {sum_.gain}, by "
            f"precision alone {sum_.by_precision}, times {sum_.by_kernel} by the kernel.",
        ]
    if table.shares:
        shares = (
            *("problem", "kernel in", "gain over fp32", "by precision", "by the kernel"),
            "by the kernel, in float32 first",
        )
        lines += ["", _line(*shares), _rule(shares[1:])]
        lines += [
            _line(
                each.problem,
                each.precision,
                f"{each.gain:.3g}",
                f"{each.precision_pct:.0f} %",
                f"{each.fusion_pct:.0f} %",
                "" if each.fusion_first_pct is None else f"{each.fusion_first_pct:.0f} %",
            )
            for each in table.shares
        ]
    if table.checked:
        lines += ["", *_checks(table.checked)]
    return "\n".join(lines) + "\n"


def _by_iteration(what: str, columns: Sequence[Sequence[Estimated]]) -> list[str]:
    most = max(map(len, columns), default=0)
    return [
        _line(f"{what} {at + 1}", *(str(c[at]) if at < len(c) else "" for c in columns))
        for at in range(most)
    ]


def _counts(row: LoopRow) -> str:
    """Tokens where the provider counted them, else characters."""
    if row.input_tokens is None or row.output_tokens is None:
        return f"{row.input_characters:,}, {row.output_characters:,} characters"
    return f"{row.input_tokens:,}, {row.output_tokens:,}"


def _checks(checked: Sequence[CheckedCandidate]) -> list[str]:
    """Both checks against each other, and each candidate of which they say different things."""
    owns = ("accepted", "refused", "not run")
    lines = [_line("judge \\ KernelBench's own check", *owns), _rule(owns)]
    for judge in ("right", "refused"):
        of = [each for each in checked if (each.judge == "right") == (judge == "right")]
        lines.append(_line(judge, *(str(sum(each.own == own for each in of)) for own in owns)))
    lines.append("")
    asked = [each for each in checked if each.loose is not None]
    if asked:
        right = [each for each in asked if each.judge == "right"]
        refused = [each for each in asked if each.judge != "right"]
        lines += [
            f"Within 1e-2 KernelBench's code accepts {sum(map(_loose, right))} of {len(right)} "
            f"right ones and {sum(map(_loose, refused))} of {len(refused)} that the judge refused.",
            "",
        ]
    for each in checked:
        if (each.judge == "right", each.own) in ((False, "accepted"), (True, "refused")):
            lines.append(f"- {each.op}, iteration {each.iteration}: {each.judge}; {each.why}")
        elif each.own == "not run":
            lines.append(f"- {each.op}, iteration {each.iteration}: not run; {each.why}")
    return lines


def _loose(each: CheckedCandidate) -> bool:
    return each.loose is True


def _shown(value: Estimated | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, Estimated):
        return str(value)
    return f"{value:,.0f}" if value >= 1e4 else f"{value:,.4g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: Sequence[str]) -> str:
    return f"| --- |{' ---: |' * len(columns)}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patcher.bench.lab.kernelbench_table")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=Path, help="folder of the problem files")
    parser.add_argument("--kernelbench", type=Path, help="KernelBench's checkout: its own code")
    parser.add_argument("--answered-by", default="", help="the model, where replies were files")
    parser.add_argument("--columns", type=Path, help="verdicts of kernelbench_columns' plan")
    parser.add_argument("--so-far", action="store_true", help="count loops that go on")
    given = parser.parse_args(words)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        kept = given.out / "own-checks.json"
        problems, checkout = given.problems, given.kernelbench
        if checkout is not None:
            package_of(checkout)
            problems = problems or checkout / "KernelBench"
        table = build_table(
            given.runs,
            problems,
            kept,
            given.so_far,
            checkout,
            given.answered_by,
            given.columns,
        )
        text = markdown(table)
        write_atomically(given.out / "README.md", text)
        document = json.dumps(table.model_dump(mode="json"), indent=1) + "\n"
        write_atomically(given.out / "table.json", document)
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: cannot write {given.out}: {error}; choose another --out", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
