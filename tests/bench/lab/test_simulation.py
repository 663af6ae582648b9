"""Whole sessions on synthetic noise: a few here, and what is committed keeps what is promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from patcher.bench import content
from patcher.bench.lab.simulation import NOISE, PAIR_SD_PCT, Row, process_pairs, sessions
from patcher.bench.stats.intervals import DEFAULT_PAIRS

COMMITTED = Path(__file__).parents[3] / "bench/results/statistics/statistics.jsonl.xz"
ROWS = [Row.model_validate_json(line) for line in content(COMMITTED).splitlines()]


def verdicts(noise: str, truth_pct: float) -> Row:
    [row] = [
        row
        for row in ROWS
        if (row.table, row.noise, row.truth_pct) == ("verdicts", noise, truth_pct)
    ]
    return row


@pytest.mark.parametrize("noise", NOISE)
def test_the_committed_table_keeps_the_promise(noise: str) -> None:
    a_a, gain, loss = (verdicts(noise, truth) for truth in (0.0, 1.0, -1.0))
    for row in (a_a, gain, loss):
        assert row.runs >= 3000
        assert (row.max_pairs, row.pair_sd_pct) == (DEFAULT_PAIRS, 0.5)
    assert a_a.accept <= 0.01 * a_a.runs
    assert gain.accept >= 0.9 * gain.runs
    assert loss.accept == 0


@pytest.mark.parametrize("noise", NOISE)
def test_the_code_still_says_what_the_table_says(noise: str) -> None:
    """The seed of a row is fixed, so its first sessions are these."""
    a_a, gain, loss = (sessions(noise, truth, 60) for truth in (0.0, 1.0, -1.0))
    assert (a_a.accept, loss.accept) == (0, 0)
    assert gain.accept >= 50


def test_a_row_of_the_table_is_made_again() -> None:
    [row] = [
        row
        for row in ROWS
        if (row.table, row.noise, row.max_pairs) == ("power", "AR(1), rho 0.6", 18)
    ]
    assert sessions(row.noise, row.truth_pct, row.runs, row.max_pairs, "power") == row


@pytest.mark.parametrize("noise", NOISE)
def test_noise_has_the_spread_that_it_says(noise: str) -> None:
    draw = np.random.default_rng(1)
    found = np.array([NOISE[noise](draw, 50) for _ in range(3000)])
    assert found.mean() == pytest.approx(0, abs=0.08)
    assert np.sqrt((found**2).mean()) == pytest.approx(1, abs=0.08)


def test_pairs_needed_agrees_with_the_simulation() -> None:
    rows = [row for row in ROWS if row.table == "pairs_needed"]
    assert len(rows) == 15
    assert min(row.accept / row.runs for row in rows) >= 0.87


def test_processes_are_told_apart_only_by_whom_they_are_named_to() -> None:
    """An A/A against no margin: 0.1 % between processes is certain to who does not know of them."""
    unaware, aware = (
        process_pairs(3, 0.0, 0.0, PAIR_SD_PCT / 10, 400, aware) for aware in (False, True)
    )
    assert unaware.accept > 0.1 * 400
    assert aware.accept <= 0.04 * 400
    for row in ROWS:
        if row.table == "processes" and row.process_aware and row.process_pairs >= 3:
            at_the_margin = row.truth_pct == row.margin_pct
            assert not at_the_margin or row.accept <= 0.031 * row.runs
