"""Combinations of patches, with a double for the measurement whose gains are known by set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from measure_sample import WORKLOAD, evidence
from measure_sets_sample import (
    OPS,
    bundles,
    ids,
)
from patch_sample import make_patch
from report_sample import comparison

from patcher import bench
from patcher.ab.job import ABJob
from patcher.ab.measurement import Measurement
from patcher.ab.set_search import find_best_set, folder_name, reported
from patcher.bench.ab.phases import ABPhase, silent
from patcher.integrate import Patch
from patcher.report import write
from patcher.report.judged import report_of
from patcher.show.throughput import best_set_lines

__all__ = ("bundles",)  # fixtures of tests here

JOB = ABJob(workload=WORKLOAD)


class Machine:
    """A double for `compare_patches`: the gain of each set of ops, in percent."""

    def __init__(self, **gains: float) -> None:
        self.gains = {frozenset(name.split("_AND_")): gain for name, gain in gains.items()}
        self.asked: list[tuple[str, ...]] = []
        self.broken: frozenset[str] = frozenset()
        self.dies_at = 100

    def __call__(self, job: ABJob, folders: Sequence[Path], report: Any) -> tuple[Measurement, ...]:
        if len(self.asked) == self.dies_at:
            raise bench.PatcherError("the patched process ended")
        ops = tuple(folder.name for folder in folders)
        self.asked.append(ops)
        report(ABPhase.PAIRS, "A/B pairs", 1, 2)
        gain = self.gains[frozenset(ops)]
        verdict = "accept" if gain > 0.7 else "reject"
        found = comparison(gain, 0.2, 30, p_value=1e-6 if gain > 0.7 else 0.9, verdict=verdict)
        parts = evidence(same_model=frozenset(ops) != self.broken)
        del parts["evaluation"]
        parts["throughput"] = parts["throughput"].model_copy(update={"comparison": found})
        return tuple(Measurement(**parts) for _ in folders)


def kept(found: Any) -> set[str]:
    return {name.split("-")[0] for name in found.best.patches}


NORM, ROPE, ROUTE = OPS


def test_each_alone_and_all_together(bundles: list[Path], tmp_path: Path) -> None:
    machine = Machine(
        **{NORM: 2.0, ROPE: 1.0, f"{NORM}_AND_{ROPE}": 3.0},
    )
    found = find_best_set(JOB, bundles[:2], tmp_path, silent, machine)
    assert machine.asked == [(NORM,), (ROPE,), (NORM, ROPE)]
    assert found.best.patches == ids(bundles, NORM, ROPE)
    assert not found.best.missing
    assert all(one.comparison.p_holm is not None for one in found.best.combinations)
    assert len(found.measured[2].measured) == len(found.measured[2].decisions) == 2
    assert len(best_set_lines(found.best)) == 2
    best = reported(found)
    of_id = {patch.manifest.id: patch for patch in map(Patch.load, bundles)}
    patches = [of_id[name] for name in best.patches]
    told = report_of(best, patches, "2026-11-21", ("patcher throughput",), best_set=found.best)
    assert told.throughput is not None
    assert told.throughput.comparison.gain_pct == 3.0
    assert told.decision is not None
    assert told.decision.verdict == "accept"
    assert told.reconciliation is not None
    assert told.receipt is not None
    assert {call.partition(":")[0] for call in told.receipt.calls} == {NORM, ROPE}
    assert [(one.op, one.patch_id) for one in told.receipts] == [
        (patch.manifest.op, patch.manifest.id) for patch in patches
    ]
    [page, text, _] = write(told, tmp_path / "report")
    assert "Combinations of patches" in text.read_text()
    assert "fused_add_rms_norm" in page.read_text()
    assert (told.candidate_source or "").count("==> ") == 2


def test_where_together_is_worse_all_but_one_are_tried(bundles: list[Path], tmp_path: Path) -> None:
    machine = Machine(
        **{NORM: 2.0, ROPE: 1.5, ROUTE: 1.0, "_AND_".join(OPS): 1.2},
        **{f"{NORM}_AND_{ROPE}": 3.4, f"{NORM}_AND_{ROUTE}": 0.2, f"{ROPE}_AND_{ROUTE}": 2.4},
    )
    found = find_best_set(JOB, bundles, tmp_path, silent, machine)
    assert len(machine.asked) == 7
    assert found.best.patches == ids(bundles, NORM, ROPE)
    assert "largest gain of 7 combinations" in found.best.reason


def test_a_set_that_is_another_model_is_not_kept(bundles: list[Path], tmp_path: Path) -> None:
    machine = Machine(**{NORM: 2.0, ROPE: 1.0, f"{NORM}_AND_{ROPE}": 3.0})
    machine.broken = frozenset({NORM, ROPE})
    found = find_best_set(JOB, bundles[:2], tmp_path, silent, machine)
    assert found.best.patches == ids(bundles, NORM)
    both = found.best.combinations[-1].comparison
    assert both.verdict == "reject"
    assert "no longer the same model" in both.reason


def test_what_was_measured_is_not_measured_again(bundles: list[Path], tmp_path: Path) -> None:
    gains = {NORM: 2.0, ROPE: 1.0, f"{NORM}_AND_{ROPE}": 3.0}
    first, second = Machine(**gains), Machine(**gains)
    first.dies_at = 2
    with pytest.raises(bench.PatcherError, match="ended"):
        find_best_set(JOB, bundles[:2], tmp_path, silent, first)
    found = find_best_set(JOB, bundles[:2], tmp_path, silent, second)
    assert second.asked == [(NORM, ROPE)]
    assert found.best.patches == ids(bundles, NORM, ROPE)
    other = JOB.model_copy(update={"margin_pct": 1.0})
    assert (
        folder_name(JOB, bundles) == folder_name(JOB, bundles[::-1]) != folder_name(other, bundles)
    )


def test_a_damaged_file_is_told(bundles: list[Path], tmp_path: Path) -> None:
    machine = Machine(**{NORM: 2.0, ROPE: 1.0, f"{NORM}_AND_{ROPE}": 3.0})
    find_best_set(JOB, bundles[:2], tmp_path, silent, machine)
    file = min(tmp_path.glob("*.json"))
    file.write_text("{")
    with pytest.raises(bench.VerificationError, match=f"{file.name} is damaged"):
        find_best_set(JOB, bundles[:2], tmp_path, silent, machine)


def test_what_is_no_set_is_refused(bundles: list[Path], tmp_path: Path) -> None:
    machine = Machine()
    other = make_patch(tmp_path / "other")
    for folders, said in (
        (bundles[:1], "one patch is no set"),
        ([bundles[0], bundles[0]], "given twice"),
        ([bundles[0], other.folder], "given twice|same patch point"),
    ):
        with pytest.raises(bench.UsageError, match=said):
            find_best_set(JOB, folders, tmp_path, silent, machine)
    assert not machine.asked
