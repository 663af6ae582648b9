"""The kernels of the library by their verdicts, as a table beside the published one.

`python -m patcher.bench.lab.kernel_table FOLDER` prints the table of a folder. Its `*.json` and
`*.json.xz` are verdicts that `patcher evaluate --json` printed.
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
"""KForge (arXiv 2606.02963): its kernels of gpt-oss-20b over TensorRT-LLM's, batch 1 to 128."""


def read(folder: Path) -> list[tuple[str, Evaluation]]:
    """Every verdict of the folder with its file's name, by op.

    Raises:
        UsageError: there is none, or a file is no verdict on a right kernel.
    """
    found = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.xz")]):
        try:
            evaluation = Evaluation.model_validate_json(content(path))
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{path} holds no verdict", "write it with: patcher evaluate ... --json"
            ) from error
        if not evaluation.right or not evaluation.timings:
            raise UsageError(f"{path} is {evaluation.outcome}", "only what is right has a row")
        found.append((path.name, evaluation))
    if not found:
        raise UsageError(
            f"{folder} holds no verdict", "write one with: patcher evaluate ... --json"
        )
    return found


def table(found: Sequence[tuple[str, Evaluation]]) -> str:
    """A table for each sweep's points, a row a kernel: the baseline's time over the kernel's, with
    the times in microseconds below it.
    """
    ops = [evaluation.op for _, evaluation in found]
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, evaluation in found:
        row = _row(name, evaluation, several=ops.count(evaluation.op) > 1)
        groups.setdefault(_points(evaluation), []).append(row)
    return "\n\n".join(_group(points, rows) for points, rows in groups.items())


def _group(points: Sequence[tuple[str, int]], rows: Sequence[str]) -> str:
    axis = points[0][0]
    columns = [f"{size:,}" for _, size in points]
    head = ["kernel", "against", *columns, "geomean", "lowest", "of light", "of launch floor"]
    head += ["sanitizer", "KForge"]
    lines = [
        f"| {' | '.join(head)} |",
        f"| --- | --- |{' ---: |' * (len(head) - 2)}",
        *rows,
    ]
    return f"By {axis}:\n\n" + "\n".join(lines)


def _row(name: str, evaluation: Evaluation, several: bool) -> str:
    """`several`: the op has other rows, over other sweeps."""
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
        _sanitized(evaluation),
        PUBLISHED.get(evaluation.op, ""),
    ]
    return f"| {' | '.join(row)} |"


def _sanitized(evaluation: Evaluation) -> str:
    """What compute-sanitizer said, if it ran."""
    said = next((check.detail for check in evaluation.checks if check.name == "sanitizer"), "")
    if "found nothing" not in said:
        return "not run"
    return "clean, races set aside" if "racecheck set aside" in said else "clean"


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"


def _points(evaluation: Evaluation) -> tuple[tuple[str, int], ...]:
    """The axis along which the points lie, with its sizes."""
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
