"""What a block's clocks were, and which pairs of blocks they make unfit to be compared."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from patcher.bench.machine.clocks import POWER_CAP, TOLERANCE, ClockSample
from patcher.bench.stats.comparison import Arm, Window

THROTTLED, SM_DRIFT, MEMORY_DRIFT = "throttled", "SM clock drifted", "memory clock drifted"
USUAL_SHARE = 0.25
"""A GPU that is at its power cap in more of the blocks than this is so because of the load: where
prefill brings it there, in every other block."""


class BlockClocks(TypedDict):
    """The fields of `Window` that tell its clocks."""

    sm_clock_mhz: int | None
    sm_clock_range_mhz: tuple[int, int] | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: tuple[str, ...]


def block_clocks(samples: Sequence[ClockSample]) -> BlockClocks:
    """Medians over the samples taken in a block, the clock's range, the highest temperature, and
    every reason to throttle that any of them saw.
    """
    sm = [sample.sm_mhz for sample in samples if sample.sm_mhz is not None]
    memory = [sample.memory_mhz for sample in samples if sample.memory_mhz is not None]
    power = [sample.power_w for sample in samples if sample.power_w is not None]
    degrees = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
    return BlockClocks(
        sm_clock_mhz=statistics.median_low(sm) if sm else None,
        sm_clock_range_mhz=(min(sm), max(sm)) if sm else None,
        memory_clock_mhz=statistics.median_low(memory) if memory else None,
        temperature_c=max(degrees, default=None),
        power_w=statistics.median(power) if power else None,
        throttle_reasons=tuple(sorted({why for sample in samples for why in sample.throttle})),
    )


def power_capped(windows: Sequence[Window]) -> bool:
    """Whether the power cap is the state in which this GPU runs this load, not an event in it.

    The governor then moves the clock by a step or two every few milliseconds, under either arm. A
    patch that draws more power loses clock by it, in service as here: to leave such blocks out
    would leave out what the patch costs.
    """
    seen = [POWER_CAP in window.throttle_reasons for window in windows]
    return sum(seen) > USUAL_SHARE * len(seen)


def unfit(windows: Sequence[Window]) -> dict[int, tuple[str, ...]]:
    """By pair, why it is left out: a block of it throttled, or a clock in it was at some moment
    more than 2 % off the session's median; where the GPU is `power_capped`, the block's own median.
    """
    capped = power_capped(windows)
    sm = _middle(window.sm_clock_mhz for window in windows)
    memory = _middle(window.memory_clock_mhz for window in windows)
    found: dict[int, set[str]] = {}
    for window in windows:
        ends = () if capped else window.sm_clock_range_mhz or ()
        slowed = set(window.throttle_reasons) - ({POWER_CAP} if capped else set())
        reasons = {THROTTLED} if slowed else set()
        drifted = any(_off(mhz, sm) for mhz in (window.sm_clock_mhz, *ends))
        reasons |= {SM_DRIFT} if drifted else set()
        reasons |= {MEMORY_DRIFT} if _off(window.memory_clock_mhz, memory) else set()
        if reasons:
            found.setdefault(window.pair, set()).update(reasons)
    return {pair: tuple(sorted(reasons)) for pair, reasons in sorted(found.items())}


def arm_clocks(windows: Sequence[Window]) -> dict[Arm, float]:
    """Mean SM clock of each arm's blocks in MHz; at the power cap a gain is to be read with it."""
    found: dict[Arm, list[int]] = {}
    for window in windows:
        if window.kind == "ab" and window.sm_clock_mhz is not None:
            found.setdefault(window.arm, []).append(window.sm_clock_mhz)
    return {arm: statistics.mean(clocks) for arm, clocks in found.items()}


def dropped(windows: Sequence[Window]) -> dict[str, int]:
    """Pairs left out by reason; one with several reasons counts in each."""
    return dict(sorted(Counter(why for each in unfit(windows).values() for why in each).items()))


def _middle(figures: Iterable[int | None]) -> float | None:
    seen = [figure for figure in figures if figure is not None]
    return statistics.median(seen) if seen else None


def _off(figure: int | None, middle: float | None) -> bool:
    return figure is not None and middle is not None and abs(figure - middle) > TOLERANCE * middle
