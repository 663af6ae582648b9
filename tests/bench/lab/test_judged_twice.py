"""The page of what was judged twice says what its files hold."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "bench/results/judged-twice"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = json.loads((FOLDER / "h200-shared.json").read_text(encoding="utf-8"))["rows"]


def test_seconds_and_speedups_by_files_and_by_shared_memory() -> None:
    for op in ("gated_delta_decode", "mamba2_decode"):
        assert len({row["digest"] for row in ROWS if row["op"] == op}) == 1
        for sets, name in (("files", f"`{op}`, by files"), ("shared", "the same, shared")):
            rows = [row for row in ROWS if row["op"] == op and row["sets"] == sets]
            assert len(rows) == 3
            check, time = ([row["phases_s"][phase] for row in rows] for phase in ("check", "time"))
            speedups = [row["speedup"] for row in rows]
            cells = [f"{min(check):.1f} to {max(check):.1f}", f"{min(time):.1f} to {max(time):.1f}"]
            line = f"| {name} | {' | '.join(cells)} | {min(speedups):.2f} to {max(speedups):.2f} |"
            assert line in PAGE


def test_medians_of_checking_and_timing() -> None:
    files, shared = (
        statistics.median(
            row["phases_s"]["check"] + row["phases_s"]["time"]
            for row in ROWS
            if row["sets"] == sets
        )
        for sets in ("files", "shared")
    )
    assert f"(median {files:.0f} s before, {shared:.1f} now)" in PAGE
    assert 7 < files / shared < 8
