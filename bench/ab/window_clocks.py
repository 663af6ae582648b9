"""The clocks of windows, and which pairs they make unusable."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict

from patcher.bench.machine.clocks import POWER_CAP, TOLERANCE, ClockSample
from patcher.bench.stats.comparison import Arm, Window

THROTTLED, SM_DRIFT, MEMORY_DRIFT = "throttled", "SM clock drifted", "memory clock drifted"
USUAL_SHARE = 0.25
"""Share of windows at the power cap above which the load itself is the cause; a load whose prefill
reaches the cap does so in every other window."""


class BlockClocks(TypedDict):
    """The fields of `Window` that describe its clocks."""

    sm_clock_mhz: int | None
    sm_clock_range_mhz: tuple[int, int] | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: tuple[str, ...]


def block_clocks(samples: Sequence[ClockSample]) -> BlockClocks:
    """Medians over the samples taken in a window, the clock's range, the highest temperature, and
    every throttle reason of any sample.
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
    """Whether the power cap is the normal state of this GPU under this load, not an event.

    The governor then moves the clock by a step or two every few milliseconds, under either arm. A
    patch that draws more power lowers the clock, in the A/B as in serving. Leaving such windows out
    would hide the cost of the patch.
    """
    seen = [POWER_CAP in window.throttle_reasons for window in windows]
    return sum(seen) > USUAL_SHARE * len(seen)


def unfit(windows: Sequence[Window]) -> dict[int, tuple[str, ...]]:
    """Why each unusable pair is left out: a window throttled, or a clock was at some moment more
    than 2 % off the session's median; if the GPU is `power_capped`, off the window's own median.
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
    """Mean SM clock in MHz of each arm's windows, which differ at the power cap."""
    found: dict[Arm, list[int]] = {}
    for window in windows:
        if window.kind == "ab" and window.sm_clock_mhz is not None:
            found.setdefault(window.arm, []).append(window.sm_clock_mhz)
    return {arm: statistics.mean(clocks) for arm, clocks in found.items()}


def dropped(windows: Sequence[Window]) -> dict[str, int]:
    """Number of pairs left out by reason; a pair with several reasons counts for each."""
    return dict(sorted(Counter(why for each in unfit(windows).values() for why in each).items()))


def _middle(figures: Iterable[int | None]) -> float | None:
    seen = [figure for figure in figures if figure is not None]
    return statistics.median(seen) if seen else None


def _off(figure: int | None, middle: float | None) -> bool:
    return figure is not None and middle is not None and abs(figure - middle) > TOLERANCE * middle
