"""What a block's clocks were, and which pairs they make unfit."""

from __future__ import annotations

from typing import Any

import pytest
from measure_sample import evidence

from patcher.bench import Window
from patcher.bench.ab.window_clocks import arm_clocks, block_clocks, dropped, power_capped, unfit
from patcher.bench.machine.clocks import ClockSample
from patcher.show.quality import clock_lines


def window(pair: int, **clocks: Any) -> Window:
    given: dict[str, Any] = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201} | clocks
    return Window(pair=pair, arm="patched", kind="ab", tokens=1, decode_s=1, prefill_s=1, **given)


GOOD = tuple(window(pair) for pair in range(8))


def test_a_block_is_told_by_all_of_its_samples() -> None:
    samples = [
        ClockSample(1980, 41, (), 3201, 400.0),
        ClockSample(1500, 44, ("power cap",), 3201, 700.0),
        ClockSample(1980, 43, ("power brake",), 3201, 500.0),
        ClockSample(),
    ]
    assert block_clocks(samples) == {
        "sm_clock_mhz": 1980,
        "sm_clock_range_mhz": (1500, 1980),
        "memory_clock_mhz": 3201,
        "temperature_c": 44,
        "power_w": 500.0,
        "throttle_reasons": ("power brake", "power cap"),
    }
    assert set(block_clocks([ClockSample()]).values()) == {None, ()}


@pytest.mark.parametrize(
    ("clocks", "reasons"),
    [
        ({}, ()),
        ({"sm_clock_mhz": 1945}, ()),
        ({"sm_clock_mhz": 1935}, ("SM clock drifted",)),
        ({"sm_clock_range_mhz": (1930, 1980)}, ("SM clock drifted",)),
        ({"sm_clock_range_mhz": (1945, 2015)}, ()),
        ({"sm_clock_range_mhz": (1980, 2025)}, ("SM clock drifted",)),
        ({"memory_clock_mhz": 1593}, ("memory clock drifted",)),
        ({"throttle_reasons": ("power cap",)}, ("throttled",)),
        (
            {"throttle_reasons": ("power cap",), "sm_clock_mhz": 1500},
            ("SM clock drifted", "throttled"),
        ),
        ({"sm_clock_mhz": None, "memory_clock_mhz": None}, ()),
    ],
)
def test_pairs_are_left_out_for_a_reason(clocks: dict[str, Any], reasons: tuple[str, ...]) -> None:
    windows = [*GOOD, window(9, **clocks)]
    assert unfit(windows) == ({9: reasons} if reasons else {})
    assert dropped([*windows, window(10, **clocks)]) == dict.fromkeys(reasons, 2)


def test_what_was_dropped_is_shown() -> None:
    throughput = evidence()["throughput"]
    assert [line.plain for line in clock_lines(throughput)] == [
        "clocks: monitored: CPU, no clock control"
    ]
    bad = window(9, throttle_reasons=("power cap",), sm_clock_mhz=1500)
    shown = clock_lines(throughput.model_copy(update={"windows": (*GOOD, bad)}))
    assert "1 SM clock drifted, 1 throttled" in shown[1].plain


def capped(pair: int, **clocks: Any) -> Window:
    return window(pair, throttle_reasons=("power cap",), sm_clock_range_mhz=(1815, 1980), **clocks)


def test_the_power_cap_is_an_event_or_the_state_of_the_load() -> None:
    few = [*GOOD, capped(9), capped(10)]
    assert not power_capped(few)
    assert set(unfit(few)) == {9, 10}
    # prefill takes the GPU there, and the first window of each pair is the one that feels it
    every_other = [one for pair in range(4) for one in (capped(pair), window(pair))]
    assert power_capped(every_other)
    assert unfit(every_other) == {}


def test_at_the_power_cap_other_reasons_and_a_lower_clock_still_count() -> None:
    hot = window(20, throttle_reasons=("hardware thermal slowdown", "power cap"))
    slow = capped(21, sm_clock_mhz=1900)
    windows = [*(capped(pair) for pair in range(9)), hot, slow]
    assert unfit(windows) == {20: ("throttled",), 21: ("SM clock drifted",)}
    assert not power_capped([])


def test_at_the_power_cap_the_clock_of_each_arm_is_shown() -> None:
    other = [each.model_copy(update={"arm": "baseline"}) for each in (capped(0), capped(1))]
    windows = (capped(0, sm_clock_mhz=1950), capped(1), *other)
    assert arm_clocks(windows) == {"patched": 1965, "baseline": 1980}
    shown = clock_lines(evidence()["throughput"].model_copy(update={"windows": windows}))
    assert "power cap; mean SM clock in MHz: patched 1965, baseline 1980" in shown[-1].plain
