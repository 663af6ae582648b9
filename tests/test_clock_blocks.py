"""What a block's clocks were, and which pairs they make unfit."""

from __future__ import annotations

from typing import Any

import pytest
from test_measure import evidence

from bench import Window
from bench.clock_blocks import block_clocks, dropped, unfit
from bench.clocks import ClockSample
from patcher.show.quality import clock_lines


def window(pair: int, **clocks: Any) -> Window:
    given: dict[str, Any] = {"sm_clock_mhz": 1980, "memory_clock_mhz": 3201} | clocks
    return Window(pair=pair, arm="patched", kind="ab", tokens=1, decode_s=1, prefill_s=1, **given)


GOOD = tuple(window(pair) for pair in range(5))


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
