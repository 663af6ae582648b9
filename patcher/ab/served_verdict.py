"""The verdict on two ways to serve: the mean over all points must gain, and no point may lose.

A pair of processes gives a log-ratio of output tokens per second at each point, at a rate of
requests one of the tokens per second that a user sees. Its mean over the concurrencies is one
sample; Student's t over pairs gives the gain's interval. A point's interval is of its own pairs in
the same way, since points scatter differently: on an H200, pairs by 1 % with 8 users and by 16 %
with 64. Two pairs tell too little of one point, so that the spread is pooled over points then.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from patcher.ab.served_records import (
    CONFIDENCE_PCT,
    PointGain,
    ServedComparison,
    ServedFigures,
    ServedHeader,
    ServedProcess,
)
from patcher.bench.ab.served import ServedRun
from patcher.bench.stats.comparison import Arm, Verdict
from patcher.bench.stats.intervals import MIN_PROCESS_PAIRS, half_width, student_t
from patcher.integrate import Receipt

LEAST_PAIRS = 2
"""Fewest process pairs for a verdict: with two, the interval is 9 standard deviations wide."""
ARMS: tuple[Arm, Arm] = ("baseline", "patched")


def judge_served(
    header: ServedHeader,
    processes: Sequence[ServedProcess],
    margin_pct: float,
    flags_no_faster: bool = True,
) -> ServedComparison:
    """Decide on the processes of whole pairs.

    Args:
        flags_no_faster: whether nothing hints that other arguments of the sides are what gains.
    """
    pairs = len(processes) // 2
    ratios = _ratios(processes)
    closed = [index for index, point in enumerate(header.points) if point.rate is None]
    counted = closed or range(len(header.points))
    means = [statistics.fmean(row[index] for index in counted) for row in ratios]
    centres = [statistics.fmean(column) for column in zip(*ratios, strict=True)]
    half = half_width(means, CONFIDENCE_PCT)
    noise = _pooled_sd(ratios, centres)
    halves = [
        _point_half_width(column, noise, len(centres)) for column in zip(*ratios, strict=True)
    ]
    gain = statistics.fmean(means)
    points = tuple(
        PointGain(
            point=point,
            figures={arm: _figures(processes, arm, index) for arm in ARMS},
            gain_pct=percent(centre),
            gain_low_pct=percent(centre - at_point),
            gain_high_pct=percent(centre + at_point),
        )
        for index, (point, centre, at_point) in enumerate(
            zip(header.points, centres, halves, strict=True)
        )
    )
    low, high = percent(gain - half), percent(gain + half)
    verdict, reasons = _verdict(header, processes, points, low, high, margin_pct, flags_no_faster)
    where = "point" if len(counted) == 1 else f"mean of {len(counted)} points"
    unit = "output tokens/s" if closed else "tokens/s of a user"
    figures = f"{percent(gain):+.2f} % {unit}, {where}"
    if pairs > 1:
        figures += f" [{low:+.2f}, {high:+.2f}], Student's t over {pairs} process pairs"
    return ServedComparison(
        points=points,
        process_pairs=pairs,
        gain_pct=percent(gain),
        gain_low_pct=low,
        gain_high_pct=high,
        margin_pct=margin_pct,
        noise_pct=None if noise is None else 100 * noise,
        verdict=verdict,
        reasons=(figures, *reasons),
    )


def _verdict(
    header: ServedHeader,
    processes: Sequence[ServedProcess],
    points: Sequence[PointGain],
    low: float,
    high: float,
    margin_pct: float,
    flags_no_faster: bool,
) -> tuple[Verdict, list[str]]:
    if wrong := _receipts_wrong(header, processes):
        return "reject", wrong
    stalled = Counter(run.point for one in processes for run in one.runs if run.stalled)
    losing = [one for one in points if one.loses and one.point not in stalled]
    if losing:
        return "reject", [f"{one.point.label} loses beyond its noise: {one.said}" for one in losing]
    void = []
    if len(processes) < 2 * LEAST_PAIRS:
        void.append("one process pair does not show what two processes differ by")
    if stalled:
        void.append(f"{stalled.total()} runs stalled, though they were taken again")
    one, other = (side.arguments for side in header.sides)
    if one != other and not flags_no_faster:
        void.append("the sides' arguments differ, and no trial shows that this alone is no faster")
    if void:
        return "inconclusive", void
    said = [f"no point loses beyond its noise; {_calls(processes)}"]
    if low > margin_pct:
        return "accept", [f"the whole interval is above the margin of {margin_pct:g} %", *said]
    if high < margin_pct:
        return "reject", [f"the whole interval is below the margin of {margin_pct:g} %"]
    return "inconclusive", [f"the interval holds the margin of {margin_pct:g} %", *said]


def _receipts_wrong(header: ServedHeader, processes: Sequence[ServedProcess]) -> list[str]:
    """What receipts say against it: a patch of a side was never reached, another one ran or another
    bundle of its name, or none of a side's patches ran.
    """
    found: dict[str, None] = {}
    for process in processes:
        side = header.sides[ARMS.index(process.arm)]
        ran = {one.patch_id for one in process.receipts if one.total_calls}
        idle = {one.patch_id: one for one in process.receipts if one.patch_id not in ran}
        for name in sorted(side.patches.keys() - ran):
            why = _why_idle(idle.get(name))
            if why is None:
                found[f"{name} never ran while {side.name} was measured"] = None
            elif not ran:
                found[f"{name} had no effect while {side.name} was measured: {why}"] = None
        for name in sorted(ran - side.patches.keys()):
            found[f"{name} ran while {side.name} was measured"] = None
        for one in process.receipts:
            if one.total_calls and side.patches.get(one.patch_id, one.digest) != one.digest:
                other = f"another bundle named {one.patch_id} ran while {side.name} was measured"
                found[other] = None
    return list(found)


def _why_idle(receipt: Receipt | None) -> str | None:
    """Why the engine's own code ran in place of a patch; None if nobody decided that."""
    if receipt is None:
        return None
    if receipt.failure is not None:
        return receipt.failure
    refused = receipt.fallbacks or receipt.layers_refused
    return max(refused, key=lambda reason: refused[reason]) if refused else None


def _calls(processes: Sequence[ServedProcess]) -> str:
    receipts = [receipt for one in processes for receipt in one.receipts]
    if not receipts:
        return "no side has a patch"
    calls = sum(one.total_calls for one in receipts)
    fell_back = sum(sum(one.fallbacks.values()) for one in receipts)
    said = f"patched kernels ran {calls:,} times, {fell_back:,} calls fell back"
    idle = {one.patch_id: _why_idle(one) for one in receipts if not one.total_calls}
    return "; ".join([said, *(f"{name} had no effect: {why}" for name, why in idle.items())])


def _ratios(processes: Sequence[ServedProcess]) -> list[list[float]]:
    """Log-ratios of what sides are compared by, of shape [pairs, points]."""
    by_pair: dict[int, dict[Arm, Sequence[ServedRun]]] = {}
    for one in processes:
        by_pair.setdefault(one.pair, {})[one.arm] = one.runs
    return [
        [
            math.log(patched.compared / baseline.compared)
            for baseline, patched in zip(arms["baseline"], arms["patched"], strict=True)
        ]
        for arms in by_pair.values()
    ]


def _pooled_sd(ratios: Sequence[Sequence[float]], centres: Sequence[float]) -> float | None:
    """Standard deviation of a log-ratio around its point's mean; None for a single pair."""
    if len(ratios) < 2:
        return None
    squares = [
        (value - centre) ** 2 for row in ratios for value, centre in zip(row, centres, strict=True)
    ]
    return math.sqrt(sum(squares) / ((len(ratios) - 1) * len(centres)))


def _point_half_width(own: Sequence[float], noise: float | None, points: int) -> float:
    """Of the mean of a point's log-ratios: by their own spread, or the pooled one of few pairs."""
    if len(own) >= MIN_PROCESS_PAIRS or noise is None:
        return half_width(own, CONFIDENCE_PCT)
    return student_t((len(own) - 1) * points, CONFIDENCE_PCT) * noise / math.sqrt(len(own))


def _figures(processes: Sequence[ServedProcess], arm: Arm, index: int) -> ServedFigures:
    own = [one for one in processes if one.arm == arm]
    runs = [one.runs[index] for one in own]
    point = runs[0].point

    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    def mean_if_timed(name: str) -> float | None:
        return None if any(getattr(run, name) is None for run in runs) else mean(name)

    def means(name: str) -> dict[str, float]:
        tables: list[Mapping[str, float]] = [getattr(run, name) for run in runs]
        keys = [key for key in tables[0] if all(key in each for each in tables)]
        return {key: statistics.fmean(each[key] for each in tables) for key in keys}

    return ServedFigures(
        output_tokens_per_s=mean("output_tokens_per_s"),
        total_tokens_per_s=mean("total_tokens_per_s"),
        user_tokens_per_s=mean_if_timed("user_tokens_per_s"),
        goodput_per_s=mean_if_timed("goodput_per_s"),
        ttft_ms=means("ttft_ms"),
        tpot_ms=means("tpot_ms"),
        itl_ms=means("itl_ms"),
        batch_ms=means("batch_ms"),
        stalls=None
        if any(run.longest_gap_ms is None for run in runs)
        else sum(one.point == point for process in own for one in process.stalled)
        + sum(run.stalled for run in runs),
    )


def percent(log_ratio: float) -> float:
    """A log-ratio in percent, within 1e6, so that it stays finite in JSON."""
    return 100 * math.expm1(min(log_ratio, math.log1p(1e4)))
