"""What `patcher throughput compare --client` says of a comparison, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from patcher.ab.served_records import PointGain, ServedResult
from patcher.ab.served_words import NO_TIMES, side_said, told
from patcher.visible import visible

HEAD = (
    *("point", "tok/s", "patched", "gain", "TPOT p50 ms", "TTFT p50 / p99 ms"),
    *("ITL p50 / p99 ms", "a batch p50 / p99 ms", "good req/s", "stalls"),
)
VERDICTS = {"accept": "green", "reject": "red", "inconclusive": "yellow"}


def served_lines(result: ServedResult) -> list[Any]:
    """The points of both sides, what was measured how, and the verdict."""
    found, header = result.comparison, result.header
    alone = "one engine" if header.offline else "one server"
    title = f"{header.workload.model} as {header.client} sees it, {alone} at a time"
    table = Table(title=Text(visible(title)))
    head, rows = told(HEAD, [point_cells(point) for point in found.points])
    for name in head:
        table.add_column(name, justify="left" if name == "point" else "right")
    for row in rows:
        table.add_row(*row)
    lines: list[Any] = [table]
    for role, side in zip(("baseline", "patched"), header.sides, strict=True):
        count = len(side.patches)
        patches = f", {count} patch{'' if count == 1 else 'es'}" if count else ""
        lines.append(Text(visible(f"{role}: {side_said(header, side)}{patches}")))
    if header.offline:
        lines.append(Text(f"{header.client} has {NO_TIMES}"))
    noise = (
        ""
        if found.noise_pct is None
        else f", a pair at a point scatters by {found.noise_pct:.2f} %"
    )
    pairs = f"{found.process_pairs} process pair{'' if found.process_pairs == 1 else 's'}"
    lines.append(Text(f"{pairs}{noise}; clocks {result.clocks}"))
    lines.append(Text(f"verdict: {found.verdict}", style=f"bold {VERDICTS[found.verdict]}"))
    lines += [Text(f"  - {visible(reason)}") for reason in found.reasons]
    return lines


def point_cells(point: PointGain) -> tuple[str, ...]:
    """One row: both sides' figures, baseline first."""
    both = (point.figures["baseline"], point.figures["patched"])
    return (
        point.point.label,
        *(f"{one.output_tokens_per_s:,.1f}" for one in both),
        point.said if point.point.rate is None else f"{point.said}, of a user",
        _times([one.tpot_ms for one in both], 3, ("p50",)),
        _times([one.ttft_ms for one in both], 0),
        _times([one.itl_ms for one in both], 2),
        _times([one.batch_ms for one in both], 1),
        _values([one.goodput_per_s for one in both], 2),
        _values([one.stalls for one in both], 0),
    )


def _times(
    tables: Sequence[Mapping[str, float]], digits: int, keys: Sequence[str] = ("p50", "p99")
) -> str:
    """Percentiles of both sides; empty if there are none."""
    if not all(tables):
        return ""
    return ", ".join(" / ".join(f"{each[key]:.{digits}f}" for key in keys) for each in tables)


def _values(values: Sequence[float | None], digits: int) -> str:
    return "" if None in values else ", ".join(f"{value:.{digits}f}" for value in values)
