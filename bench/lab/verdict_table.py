"""Verdicts on the whole model, as a table beside the published one.

`python -m patcher.bench.lab.verdict_table FOLDER` prints the table of a folder. Its `*.json` and
`*.json.xz` are what `patcher throughput` wrote to `--out`, of one verdict or of a best set, or
lists of such verdicts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from patcher.ab.other_workloads import OtherWorkloads
from patcher.ab.result import ABResult
from patcher.ab.set_search import SetSearch
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
    """Every verdict of the folder, in the order of its files.

    Raises:
        UsageError: there is none, or a file holds something else.
    """
    found: list[ABResult] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.xz")]):
        try:
            text = content(path)
            document = json.loads(text)
            if isinstance(document, list) and document:
                found += VERDICTS.validate_json(text)
            elif "best" in document:
                found += SetSearch.model_validate_json(text).measured
            else:
                found.append(ABResult.model_validate_json(text))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{path} holds no verdict",
                "write it with: patcher throughput compare --out FILE",
            ) from error
    if not found:
        raise UsageError(
            f"{folder} holds no verdict",
            "write one with: patcher throughput compare --out FILE",
        )
    return found


def table(found: Sequence[ABResult]) -> str:
    """A row a verdict, below it one for each other batch size and context; then what is published.
    Tokens per second are medians over windows, the gain comes with its interval.
    """
    lines = [f"| {' | '.join(HEAD)} |", f"| --- |{' ---: |' * (len(HEAD) - 2)} --- |"]
    for judged in found:
        lines.append(_row(judged))
        others = judged.measured[0].other_workloads
        lines += _other_rows(others) if others is not None else ()
    return "\n".join([*lines, PUBLISHED])


def _row(judged: ABResult) -> str:
    throughput = judged.measured[0].throughput
    workload, steps = throughput.workload, patched_steps(throughput)
    calls = [one.receipt.total_calls / steps if steps else 0.0 for one in judged.measured]
    control = throughput.control
    return _line(
        ", ".join(f"`{patch}`" for patch in judged.patches),
        str(workload.batch),
        f"{workload.input_len:,} to {workload.input_len + workload.output_len:,}",
        throughput.comparison,
        control.figures if control else "not taken",
        " + ".join(f"{each:.4g}" for each in calls),
        f"**{judged.decision.verdict}**",
    )


def _other_rows(others: OtherWorkloads) -> Iterator[str]:
    for point in others.points:
        standing = others.standing(point)
        yield _line("", str(point.batch), f"{point.context:,}", point.comparison, "", "", standing)


def _line(
    patches: str,
    batch: str,
    context: str,
    found: Comparison,
    control: str,
    calls: str,
    verdict: str,
) -> str:
    rates = f"{found.baseline_tokens_per_s:,.1f} to {found.patched_tokens_per_s:,.1f}"
    pairs = f"{found.pairs} ({found.process_pairs})" if found.process_pairs else str(found.pairs)
    cells = (patches, batch, context, rates, found.figures, control, pairs, calls, verdict)
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
