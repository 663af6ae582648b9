"""Near ties of a small model that has learned the cloze items."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cloze_sample import trained

from patcher.bench import content
from patcher.bench.lab import near_ties

RESULTS = Path(__file__).parents[3] / "bench/results"


def test_real_and_random_weights_after_text_and_random_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    out = tmp_path / "out.json"
    words = [str(out), str(tmp_path), "--batch", "4", "--input-len", "12", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", ["near_ties", *words, "--threads", "1"])
    near_ties.main()
    rows = json.loads(out.read_text(encoding="utf-8"))
    kinds = [(row["weights"], row["prompts"]) for row in rows]
    assert kinds == [
        ("real", "text"),
        ("real", "random tokens"),
        ("random", "text"),
        ("random", "random tokens"),
    ]
    for row in rows:
        assert row["positions"] == 4 * (9 + 1)
        assert 0 <= row["near_ties"] <= row["within_max_error"] <= row["positions"]
        assert row["near_tie_pct"] == pytest.approx(100 * row["near_ties"] / row["positions"])
        assert row["flip_allowance"] > 0
        gaps = list(row["gap_percentiles"].values())
        assert gaps == sorted(gaps)
    learned, drawn = (row["gap_percentiles"]["p50"] for row in rows[::2])
    assert learned > drawn, "a model that has learned is surer"


def test_the_page_says_how_near_published_changes_were() -> None:
    found: list[float] = []

    def look(one: Any) -> None:
        if isinstance(one, dict) and one.get("worst_flip_margin") is not None:
            found.append(one["worst_flip_margin"] / one["baseline_rmse"])
        for each in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
            look(each)

    for file in RESULTS.glob("h*00-*/**/*.json.xz"):
        look(json.loads(content(file)))
    page = (RESULTS / "real-weights/README.md").read_text(encoding="utf-8")
    said = f"In all {len(found)} published verdicts with a changed pick, the widest gap"
    assert said in " ".join(page.split())
    assert f"at most {max(found):.1f} times" in " ".join(page.split())
