"""Print a table of the library's kernels and their evaluations, next to published results.

`python -m patcher.bench.lab.kernel_table FOLDER` prints the table of a folder, whose `*.json` and
`*.json.xz` files are output of `patcher evaluate --json`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.judge.evaluation import Evaluation
from patcher.bench.records import content

PUBLISHED = {
    "fused_add_rms_norm": "1.10 to 1.13x",
    "moe_finalize": "1.06 to 1.43x",
    "rope_kv_update": "0.99 to 1.05x",
}
"""Speedups of KForge (arXiv 2606.02963) over TensorRT-LLM for gpt-oss-20b, batch 1 to 128."""
NOT_RUN = "not run"


def read(folder: Path) -> list[tuple[str, Evaluation]]:
    """Read all evaluations of a folder, with their file names.

    Raises:
        UsageError: the folder has none, or a file is no evaluation of a correct kernel.
    """
    evaluations = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.xz")]):
        try:
            evaluation = Evaluation.model_validate_json(content(path))
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{path} holds no verdict", "write it with: patcher evaluate ... --json"
            ) from error
        if not evaluation.right or not evaluation.timings:
            raise UsageError(f"{path} is {evaluation.outcome}", "remove it: the kernel must pass")
        evaluations.append((path.name, evaluation))
    if not evaluations:
        raise UsageError(
            f"{folder} holds no verdict", "write one with: patcher evaluate ... --json"
        )
    return evaluations


def table(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    """Format one table per set of points, with one row per kernel.

    A cell holds the speedup over the baseline, and below it the kernel's time in microseconds. The
    sanitizer has a column where it ran for a kernel.
    """
    ops = [evaluation.op for _, evaluation in evaluations]
    sanitized = any(_sanitized(evaluation) != NOT_RUN for _, evaluation in evaluations)
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, evaluation in evaluations:
        row = _row(name, evaluation, ops.count(evaluation.op) > 1, sanitized)
        groups.setdefault(_points(evaluation), []).append(row)
    return "\n\n".join(_group(points, rows, sanitized) for points, rows in groups.items())


def _group(points: Sequence[tuple[str, int]], rows: Sequence[str], sanitized: bool) -> str:
    axis = points[0][0]
    columns = [f"{size:,}" for _, size in points]
    head = ["kernel", "against", *columns, "geomean", "lowest", "of light", "of launch floor"]
    head += [*(["sanitizer"] if sanitized else []), "KForge"]
    lines = [
        f"| {' | '.join(head)} |",
        f"| --- | --- |{' ---: |' * (len(head) - 2)}",
        *rows,
    ]
    return f"By {axis}:\n\n" + "\n".join(lines)


def _row(name: str, evaluation: Evaluation, several: bool, sanitized: bool) -> str:
    """Format a row; `several`: the op has further rows for other sweeps."""
    timings = evaluation.timings
    cells = [f"{one.speedup:.2f}x<br>{one.candidate_us:.2f}" for one in timings]
    lowest = min(timings, key=lambda one: one.speedup_low)
    light = [one.sol_pct for one in timings if one.sol_pct is not None]
    launch = [one.launch_pct for one in timings if one.launch_pct is not None]
    row = [
        f"[`{evaluation.op}`]({name}), {evaluation.language}"
        + (f", sweep `{evaluation.sweep}`" if several and evaluation.sweep else ""),
        evaluation.baseline or "",
        *cells,
        f"**{evaluation.geomean_speedup:.2f}x**",
        f"{lowest.speedup_low:.2f}x",
        _range(light),
        _range(launch),
        *([_sanitized(evaluation)] if sanitized else []),
        PUBLISHED.get(evaluation.op, ""),
    ]
    return f"| {' | '.join(row)} |"


def _sanitized(evaluation: Evaluation) -> str:
    """Result of compute-sanitizer, if it ran."""
    detail = next((check.detail for check in evaluation.checks if check.name == "sanitizer"), "")
    if "found nothing" not in detail:
        return NOT_RUN
    return "clean, races set aside" if "racecheck set aside" in detail else "clean"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"


def _points(evaluation: Evaluation) -> tuple[tuple[str, int], ...]:
    """The axis that varies over the points, with its sizes."""
    axes = [timing.axes for timing in evaluation.timings]
    moving = next((name for name in axes[0] if len({one[name] for one in axes}) > 1), "tokens")
    return tuple((moving, one[moving]) for one in axes)


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print("usage: python -m patcher.bench.lab.kernel_table FOLDER", file=sys.stderr)
        return 2
    try:
        print(table(read(Path(words[0]))))
    except PatcherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
