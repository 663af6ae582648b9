"""The contents of each section, computed from the record: rows, stages, the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from patcher.attempts import Attempt
from patcher.bench import Outcome, Throughput, Timing, Window
from patcher.bench.ab.window_clocks import power_capped
from patcher.bench.stats.comparison import Verdict
from patcher.hotspot import Hotspot, Profile
from patcher.models.ceilings import CostLedger, dollars
from patcher.report import wording
from patcher.report.record import Report
from patcher.report.step import chain_numbers
from patcher.status import best_of


@dataclass(frozen=True)
class PairRow:
    pair: int
    baseline: float
    """Output tokens per second."""
    patched: float
    gain_pct: float
    process: int | None = None
    """The process pair that it ran in."""
    swapped: bool | None = None


@dataclass(frozen=True)
class HotspotRow:
    rank: int
    name: str
    share_pct: float
    origin: str
    operation: str
    op: str | None
    instances: int | None
    mean_us: float | None
    per_step: float | None
    ceiling_pct: float | None
    kind: str = "kernel"
    """`kernel`, `chain`, `memory` or `idle`."""
    wall_pct: float | None = None
    reachable_pct: float | None = None
    sol_pct: float | None = None
    triage: str | None = None
    reason: str = ""
    chain: int | None = None
    """For a chain: its number among the chains, which determines its colour."""
    members: tuple[str, ...] = ()
    """Of a chain: its kernels."""
    gap_us: float | None = None
    """Of a chain: idle time inside it, each time it runs."""

    @property
    def length_pct(self) -> float:
        """Share that its bar shows: of the wall time, if that is known."""
        return self.share_pct if self.wall_pct is None else self.wall_pct


@dataclass(frozen=True)
class SweepRow:
    label: str
    candidate_us: float
    baseline_us: float
    speedup: float
    speedup_low: float
    speedup_high: float
    pairs: int
    calls: int
    sol_pct: float | None = None
    launch_pct: float | None = None

    @property
    def sol_us(self) -> float | None:
        """The time of one call at the speed of light."""
        return None if self.sol_pct is None else self.candidate_us * self.sol_pct / 100


@dataclass(frozen=True)
class SweepGroup:
    """Rows along one axis with the other axes fixed."""

    axis: str
    fixed: str
    rows: tuple[SweepRow, ...]

    @property
    def drawable(self) -> bool:
        values = [
            value
            for row in self.rows
            for value in (row.candidate_us, row.baseline_us, row.speedup_low, row.speedup)
        ]
        return all(math.isfinite(value) and value > 0 for value in values) and all(
            math.isfinite(row.speedup_high) for row in self.rows
        )


@dataclass(frozen=True)
class AttemptRow:
    iteration: int
    phase: str
    outcome: str
    speedup: float | None
    recommendation: str | None
    detail: str
    best: bool
    repairs: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One stage of the path, and its state in the run."""

    label: str
    state: Literal["done", "failed", "missing"]
    anchor: str
    word: str


@dataclass(frozen=True)
class Headline:
    """The verdict at the top; `verdict` is None if the run reached none."""

    verdict: Verdict | None
    gain_pct: float | None
    low_pct: float | None
    high_pct: float | None
    margin_pct: float | None
    confidence_pct: float | None
    reasons: tuple[str, ...]


def pair_rows(windows: Iterable[Window], kind: Literal["ab", "aa"]) -> list[PairRow]:
    """Complete pairs in the order measured; a pair that lost a window has no gain."""
    sides: dict[int, dict[str, Window]] = {}
    for window in windows:
        if window.kind == kind and window.decode_s > 0 and window.tokens > 0:
            sides.setdefault(window.pair, {})[window.arm] = window
    rows = []
    for pair, arms in sides.items():
        if len(arms) == 2:
            first, second = arms["baseline"], arms["patched"]
            rates = first.tokens_per_s, second.tokens_per_s
            gain = (rates[1] / rates[0] - 1) * 100
            rows.append(PairRow(pair, *rates, gain, first.process, first.swapped))
    return rows


def hotspot_rows(profile: Profile | None) -> list[HotspotRow]:
    """Hotspots by rank."""
    if profile is None:
        return []
    numbers = chain_numbers(profile)
    return [_hotspot_row(spot, numbers.get(at)) for at, spot in enumerate(profile.hotspots)]


def _hotspot_row(spot: Hotspot, chain: int | None) -> HotspotRow:
    return HotspotRow(
        rank=spot.rank,
        name=spot.name,
        share_pct=spot.share_pct,
        origin=spot.origin,
        operation=spot.operation,
        op=spot.op,
        instances=spot.instances,
        mean_us=spot.mean_ns / 1e3,
        per_step=spot.per_step,
        ceiling_pct=spot.ceiling_pct,
        kind=spot.kind,
        wall_pct=spot.wall_pct,
        reachable_pct=spot.reachable_pct,
        sol_pct=spot.sol_pct,
        # a profile of an earlier version has none, which is not the same as `leave`
        triage=spot.triage if "triage" in spot.model_fields_set else None,
        reason=spot.reason,
        chain=chain,
        members=() if chain is None else tuple(variant.name for variant in spot.variants),
        gap_us=_gap_us(spot) if chain is not None else None,
    )


def _gap_us(chain: Hotspot) -> float | None:
    return chain.gap_ns / chain.instances / 1e3 if chain.gap_ns and chain.instances else None


def sweep_groups(timings: Sequence[Timing]) -> list[SweepGroup]:
    """Timings in runs along one axis: a repeated point begins the next run (another dtype)."""
    runs: list[list[Timing]] = []
    for timing in timings:
        if not runs or any(timing.axes == other.axes for other in runs[-1]):
            runs.append([])
        runs[-1].append(timing)
    return [_group(run) for run in runs]


def _group(run: Sequence[Timing]) -> SweepGroup:
    names = list(dict.fromkeys(name for timing in run for name in timing.axes))
    varying = [
        name for name in names if len({timing.axes.get(name) for timing in run}) > 1
    ] or names[:1]
    fixed = ", ".join(f"{name} {run[0].axes[name]}" for name in names if name not in varying)
    rows = tuple(
        SweepRow(
            label=" \N{MULTIPLICATION SIGN} ".join(
                str(timing.axes.get(name, "?")) for name in varying
            ),
            **timing.model_dump(include={field.name for field in fields(SweepRow)}),
        )
        for timing in run
    )
    return SweepGroup(
        axis=" \N{MULTIPLICATION SIGN} ".join(varying) or "point", fixed=fixed, rows=rows
    )


def attempt_rows(attempts: Sequence[Attempt]) -> list[AttemptRow]:
    best = best_of(attempts)
    return [
        AttemptRow(
            iteration=attempt.iteration,
            phase=attempt.phase,
            outcome=attempt.outcome.value,
            speedup=attempt.geomean_speedup,
            recommendation=_asked_for(attempt),
            detail=attempt.detail,
            best=attempt is best,
            repairs=attempt.repairs,
        )
        for attempt in attempts
    ]


COST_HEAD = ("", "Dollars", "Tokens", "Minutes")


def cost_rows(ledger: CostLedger) -> list[list[str]]:
    """A row for each column of the ledger."""
    return [
        [name, dollars(each.usd), wording.count(each.tokens), f"{each.wall_s / 60:.1f}"]
        for name, each in ledger.columns().items()
    ]


def _asked_for(attempt: Attempt) -> str | None:
    """The advice, and its expected speedup."""
    if advice := attempt.recommendation:
        expected = advice.expected_speedup
        return advice.change + ("" if expected is None else f" (expected {expected:.3g}x)")
    if attempt.diagnosis:
        return attempt.diagnosis.minimal_fix
    return attempt.analysis_failure


def headline(report: Report) -> Headline:
    """The decision; without one, the comparison's figures and why there is none."""
    decision = report.decision
    found = report.throughput.comparison if report.throughput else None
    figures = decision or found
    reasons: tuple[str, ...] = (report.stopped or "The run ended before a decision was made.",)
    return Headline(
        verdict=decision.verdict if decision else None,
        gain_pct=figures.gain_pct if figures else None,
        low_pct=figures.gain_low_pct if figures else None,
        high_pct=figures.gain_high_pct if figures else None,
        margin_pct=figures.margin_pct if figures else None,
        confidence_pct=found.confidence_pct if found else None,
        reasons=decision.reasons if decision else reasons,
    )


def title(report: Report) -> str:
    """The model and the verdict."""
    decision = report.decision
    verdict = wording.VERDICTS[decision.verdict].lower() if decision else "no verdict"
    return f"{report.model or report.title}: {verdict}"


def subject(report: Report) -> str:
    """The subject of a report: the run, or the patches that were measured outside of one."""
    return f"{len(report.receipts)} patches together" if report.receipts else report.run_id


def stages(report: Report) -> list[Stage]:
    """The path of a gain, stage by stage."""
    best, quality, receipt = report.best, report.quality, report.receipt
    right = best is not None and best.outcome is Outcome.CORRECT
    ran = receipt is not None and sum(receipt.calls.values()) > 0
    decision = report.decision
    return [
        _stage("Profile", "hotspots", None if report.profile is None else True, "read", ""),
        _stage("Candidate", "iterations", bool(best or report.attempts) or None, "written", ""),
        _stage(
            "Judge", "judge", None if best is None else right, "correct and faster", "not accepted"
        ),
        _stage(
            "Engine", "receipts", None if receipt is None else ran, "patch ran", "patch never ran"
        ),
        _stage("A/B", "ab", None if report.throughput is None else True, "measured", ""),
        _stage("Quality", "quality", quality.passed if quality else None, "same model", "drifted"),
        _stage(
            "Decision",
            "verdict",
            True if decision else None,
            decision.verdict if decision else "",
            "",
        ),
        _stage("Revert", "quality", report.reverted_identical, "bit-identical", "output differs"),
    ]


def clock_facts(throughput: Throughput | None) -> list[tuple[str, str]]:
    """Clock and temperature of the device in the windows, if they were recorded."""
    windows = throughput.windows if throughput else ()
    facts = []
    for name, unit, values in (
        ("SM clock", "MHz", [one.sm_clock_mhz for one in windows]),
        ("Temperature", "\N{DEGREE SIGN}C", [one.temperature_c for one in windows]),
    ):
        seen = [value for value in values if value is not None]
        if seen:
            facts.append((name, f"{min(seen):,} to {max(seen):,} {unit}"))
    if facts:
        slowed = sum(bool(one.throttle_reasons) for one in windows)
        told = f"{slowed} of {len(windows)} windows"
        if power_capped(windows):
            told += ", by the power cap, as usual for this workload"
        facts.append(("Throttled", told))
    return facts


def _stage(label: str, anchor: str, passed: bool | None, good: str, bad: str) -> Stage:
    if passed is None:
        return Stage(label, "missing", anchor, "not reached")
    return Stage(label, "done" if passed else "failed", anchor, good if passed else bad)
