"""The end-to-end A/B: what is dropped, what is refused, whose kernel calls are whose."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from measure_sample import WORKLOAD, ScriptedEngine

from patcher import bench
from patcher.bench import Throughput, Window, Workload
from patcher.bench.ab.throughput import compare_in_one_process, compare_windows, unfit_pairs
from patcher.bench.engines import Decoding
from patcher.bench.machine.clocks import ClockMonitor, ClockSample


class ScriptedClocks(ClockMonitor):
    """A double for a GPU's clocks: one MHz figure for each sample, the last one repeated."""

    def __init__(self, script: list[int], throttle: tuple[str, ...] = ()) -> None:
        super().__init__("cuda")
        self._script, self._throttle, self.taken = script, throttle, 0

    def sample(self) -> ClockSample:
        mhz = self._script[min(self.taken, len(self._script) - 1)]
        self.taken += 1
        return ClockSample(mhz, 40 + self.taken % 2, self._throttle)


class CountingEngine(ScriptedEngine):
    """A double whose patched state calls a kernel once a step; `leaks`: in the baseline too."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__(3.0)
        self.calls, self.leaks = 0, leaks
        self.collected_while_timed = False

    def decode(self, decoding: Decoding, steps: int) -> None:
        self.collected_while_timed |= gc.isenabled()
        self.calls += steps * (self.patched or self.leaks)
        super().decode(decoding, steps)


def run(
    engine: ScriptedEngine,
    clocks: ClockMonitor | None = None,
    workload: Workload = WORKLOAD,
    **options: Any,
) -> Throughput:
    asked: dict[str, Any] = {"margin_pct": 0.5, "max_pairs": 12, "looks": 1, "patch_id": "p"}
    return compare_in_one_process(
        engine,
        {"baseline": nullcontext, "patched": engine.patch},
        workload,
        clocks=clocks or ClockMonitor("cpu"),
        **asked | options,
    )


def test_kernel_calls_are_told_apart_by_window() -> None:
    engine = CountingEngine()
    found = run(engine, kernel_calls=lambda: engine.calls, max_pairs=6)
    by_side: dict[tuple[str, str], set[int | None]] = {}
    for window in found.windows:
        by_side.setdefault((window.kind, window.arm), set()).add(window.kernel_calls)
    assert by_side == {
        ("ab", "patched"): {WORKLOAD.output_len},
        ("ab", "baseline"): {0},
        ("aa", "patched"): {0},
        ("aa", "baseline"): {0},
    }
    leaking = CountingEngine(leaks=True)
    leaked = run(leaking, kernel_calls=lambda: leaking.calls, max_pairs=6)
    assert all(window.kernel_calls for window in leaked.windows)
    assert all(
        window.kernel_calls is None for window in run(ScriptedEngine(3.0), max_pairs=6).windows
    )


def test_nothing_is_collected_within_a_window() -> None:
    class Checked(CountingEngine):
        def prefill(self, prompts: torch.Tensor) -> Decoding:
            self.collected_while_timed = False
            return super().prefill(prompts)

    engine = Checked()
    run(engine)
    assert not engine.collected_while_timed
    assert gc.isenabled()


def test_drifted_pairs_are_dropped_and_counted() -> None:
    samples_a_pair = 2 * 2  # two arms, two turns each
    script = [1980] * (3 * samples_a_pair) + [1900] * samples_a_pair + [1980]
    found = run(ScriptedEngine(3.0), ScriptedClocks(script))
    off = {window.pair for window in found.windows if window.sm_clock_mhz == 1900}
    assert len(off) == 1
    assert unfit_pairs(list(found.windows)) == off
    dropped = found.comparison.dropped_pairs + (found.control.dropped_pairs if found.control else 0)
    assert dropped == 2  # the warm-up pair and the drifted one
    assert {window.temperature_c for window in found.windows} == {41}


def test_a_clock_within_two_percent_is_kept() -> None:
    found = run(ScriptedEngine(3.0), ScriptedClocks([1980, 1950]))
    assert unfit_pairs(list(found.windows)) == frozenset()


def test_a_session_that_throttles_throughout_says_so() -> None:
    with pytest.raises(bench.PatcherError, match=r"none of 1\d pairs") as caught:
        run(ScriptedEngine(3.0), ScriptedClocks([1980], ("hardware thermal slowdown",)))
    assert "cool" in caught.value.hint


def test_a_load_that_runs_at_the_power_cap_is_judged_there() -> None:
    found = run(ScriptedEngine(3.0), ScriptedClocks([1965, 1950], ("power cap",)))
    assert found.comparison.verdict == "accept"
    assert unfit_pairs(list(found.windows)) == frozenset()


def test_a_control_without_a_usable_pair_is_none() -> None:
    window = Window(
        pair=0, arm="baseline", kind="aa", tokens=1, decode_s=1, prefill_s=1,
        throttle_reasons=("power brake",),
    )  # fmt: skip
    other = window.model_copy(update={"arm": "patched"})
    assert compare_windows([window, other], "aa", 0.5, 95.0) is None
    assert compare_windows([], "aa", 0.5, 95.0) is None


def test_a_window_of_one_step_is_refused() -> None:
    with pytest.raises(bench.UsageError, match="1 decode step"):
        run(ScriptedEngine(3.0), workload=WORKLOAD.model_copy(update={"output_len": 1}))


def test_the_session_stops_when_a_look_decides() -> None:
    clear = run(ScriptedEngine(5.0), max_pairs=40, looks=4)
    assert clear.comparison.verdict == "accept"
    assert clear.comparison.pairs < 40
    assert clear.comparison.confidence_pct > 95
    unclear = run(ScriptedEngine(0.5), max_pairs=12, looks=2)
    assert unclear.comparison.verdict == "inconclusive"
    assert unclear.comparison.pairs >= 12


def test_the_same_seed_takes_the_same_order_and_another_does_not() -> None:
    def order(seed: int) -> list[tuple[int, str]]:
        return [(w.pair, w.arm) for w in run(ScriptedEngine(3.0), seed=seed, max_pairs=6).windows]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in (1, 2, 3)}) > 1


@pytest.mark.parametrize("seed", range(6))
def test_each_arm_of_the_control_begins_every_other_time(seed: int) -> None:
    """Else what the beginning of a pair does to an arm looks like a gain."""
    windows = run(ScriptedEngine(0.5), seed=seed, max_pairs=24, looks=1).windows
    control = [window for window in windows if window.kind == "aa"]
    begins = [window.arm for window in control[::2]]
    assert len(begins) == 8
    for one, other in zip(begins[::2], begins[1::2], strict=True):
        assert {one, other} == {"baseline", "patched"}


def test_a_failure_within_a_window_leaves_the_engine_unpatched() -> None:
    class Failing(ScriptedEngine):
        def decode(self, decoding: Decoding, steps: int) -> None:
            if self.patched and len(self.seen) > 4:
                raise RuntimeError("lost")
            super().decode(decoding, steps)

    engine = Failing(3.0)
    with pytest.raises(RuntimeError, match="lost"):
        run(engine)
    assert not engine.patched
    assert gc.isenabled()
