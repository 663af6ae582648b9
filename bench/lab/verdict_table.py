"""Print a table of verdicts on whole models, next to a published result.

`python -m patcher.bench.lab.verdict_table FOLDER` prints the table of a folder. Its `*.json` and
`*.json.xz` files are output of `patcher throughput --out`: one verdict, a best set, or a list of
verdicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from patcher.ab.job import ABResult
from patcher.ab.other_workloads import OtherWorkloads
from patcher.ab.sets import SetSearch
from patcher.bench import Comparison, PatcherError, UsageError, content
from patcher.reconciling.launches import patched_steps

HEAD = (
    "patches",
    "batch",
    "context",
    "tokens/s",
    "gain",
    "A/A control",
    "pairs (processes)",
    "calls a step",
    "verdict",
)
VERDICTS = TypeAdapter(list[ABResult])
PUBLISHED = (
    "| KForge (arXiv 2606.02963): norm, finalize, RoPE + KV over TensorRT-LLM | 8 | 1,024 to 9,216 "
    "| 2,601.6 to 2,656.6 | +2.12 % | | seven runs a side | | |"
)


def read(folder: Path) -> list[ABResult]:
    """Read all verdicts of a folder, in the order of its files.

    Raises:
        UsageError: the folder has none, or a file holds something else.
    """
    verdicts: list[ABResult] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.xz")]):
        try:
            text = content(path)
            document = json.loads(text)
            if isinstance(document, list):
                verdicts += VERDICTS.validate_json(text)
            elif "best" in document:
                verdicts += SetSearch.model_validate_json(text).measured
            else:
                verdicts.append(ABResult.model_validate_json(text))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{path} holds no verdict", "write it with: patcher throughput ... --out FILE"
            ) from error
    if not verdicts:
        raise UsageError(
            f"{folder} holds no verdict", "write one with: patcher throughput ... --out FILE"
        )
    return verdicts


def table(verdicts: Sequence[ABResult]) -> str:
    """Format one row per verdict, followed by rows for other workloads, and the published result.

    Tokens per second are medians over windows, and the gain has its interval.
    """
    lines = [f"| {' | '.join(HEAD)} |", f"| --- |{' ---: |' * (len(HEAD) - 2)} --- |"]
    for verdict in verdicts:
        lines.append(_row(verdict))
        elsewhere = verdict.measured[0].elsewhere
        lines += _other_rows(elsewhere) if elsewhere is not None else ()
    return "\n".join([*lines, PUBLISHED])


def _row(verdict: ABResult) -> str:
    throughput = verdict.measured[0].throughput
    workload, steps = throughput.workload, patched_steps(throughput)
    calls = [one.receipt.total_calls / steps if steps else 0.0 for one in verdict.measured]
    control = throughput.control
    return _line(
        ", ".join(f"`{patch}`" for patch in verdict.patches),
        str(workload.batch),
        f"{workload.input_len:,} to {workload.input_len + workload.output_len:,}",
        throughput.comparison,
        control.figures if control else "not taken",
        " + ".join(f"{each:.4g}" for each in calls),
        f"**{verdict.decision.verdict}**",
    )


def _other_rows(elsewhere: OtherWorkloads) -> Iterator[str]:
    for point in elsewhere.points:
        standing = elsewhere.standing(point)
        yield _line("", str(point.batch), f"{point.context:,}", point.comparison, "", "", standing)


def _line(
    patches: str,
    batch: str,
    context: str,
    comparison: Comparison,
    control: str,
    calls: str,
    verdict: str,
) -> str:
    baseline, patched = comparison.baseline_tokens_per_s, comparison.patched_tokens_per_s
    rates = f"{baseline:,.1f} to {patched:,.1f}"
    pairs = str(comparison.pairs)
    if comparison.process_pairs:
        pairs += f" ({comparison.process_pairs})"
    cells = (patches, batch, context, rates, comparison.figures, control, pairs, calls, verdict)
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print("usage: python -m patcher.bench.lab.verdict_table FOLDER", file=sys.stderr)
        return 2
    try:
        print(table(read(Path(words[0]))))
    except PatcherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
