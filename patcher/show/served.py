"""What `patcher throughput compare --client` says of a comparison, for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from patcher.ab.served_records import PointGain, ServedResult

VERDICTS = {"accept": "green", "reject": "red", "inconclusive": "yellow"}


def served_lines(result: ServedResult) -> list[Any]:
    """The points of both sides, what was measured how, and the verdict."""
    found, header = result.comparison, result.header
    table = Table(title=f"{header.workload.model} as {header.client} sees it, one server at a time")
    for name in ("point", "tok/s", "patched", "gain", "TPOT p50 ms", "TTFT p50 / p99 ms"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for name in ("ITL p50 / p99 ms", "good req/s", "stalls"):
        table.add_column(name, justify="right")
    for point in found.points:
        table.add_row(*point_cells(point))
    lines: list[Any] = [table]
    for role, side in zip(("baseline", "patched"), header.sides, strict=True):
        patches = f", {len(side.patches)} patches" if side.patches else ""
        lines.append(Text(f"{role}: {header.workload.engine} {side.version} {side.name}{patches}"))
    noise = (
        ""
        if found.noise_pct is None
        else f", a pair at a point scatters by {found.noise_pct:.2f} %"
    )
    lines.append(Text(f"{found.process_pairs} process pairs{noise}; clocks {result.clocks}"))
    lines.append(Text(f"verdict: {found.verdict}", style=f"bold {VERDICTS[found.verdict]}"))
    lines += [Text(f"  - {reason}") for reason in found.reasons]
    return lines


def point_cells(point: PointGain) -> tuple[str, ...]:
    """One row: both sides' figures, baseline first."""
    both = (point.figures["baseline"], point.figures["patched"])
    return (
        point.point.label,
        *(f"{one.output_tokens_per_s:,.1f}" for one in both),
        point.said if point.point.rate is None else f"{point.said}, of a user",
        ", ".join(f"{one.tpot_ms['p50']:.3f}" for one in both),
        ", ".join(f"{one.ttft_ms['p50']:.0f} / {one.ttft_ms['p99']:.0f}" for one in both),
        ", ".join(f"{one.itl_ms['p50']:.2f} / {one.itl_ms['p99']:.2f}" for one in both),
        ", ".join(f"{one.goodput_per_s:.2f}" for one in both),
        ", ".join(str(one.stalls) for one in both),
    )
