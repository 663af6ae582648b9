"""Planted gains on a simulated clock: found, missed, and judged the wrong way round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from measure_sample import WORKLOAD, ScriptedEngine

from patcher.bench.ab.planted import PlantedGains, model_delay, plant, step_seconds
from patcher.bench.engines import Decoding
from patcher.bench.machine.clocks import ClockMonitor


class DelayedEngine(ScriptedEngine):
    """A double whose steps take 10 ms, more while delayed; `noise_pct` of a turn; `inverted` is an
    engine that runs faster when told to wait.
    """

    def __init__(self, noise_pct: float = 0.1, inverted: bool = False) -> None:
        super().__init__(0.0)
        self.noise_pct, self.sign, self.delay_s = noise_pct, -1 if inverted else 1, 0.0

    @contextmanager
    def delayed(self, seconds: float) -> Iterator[None]:
        self.delay_s = seconds
        try:
            yield
        finally:
            self.delay_s = 0.0

    def decode(self, decoding: Decoding, steps: int) -> None:
        decoding.picked += [torch.full((2, 1), 1)] * steps
        noise = 1 + self.rng.gauss(0, self.noise_pct) / 100
        decoding.decode_s += steps * (0.01 * noise + self.sign * self.delay_s)


def planted(engine: DelayedEngine, **options: Any) -> PlantedGains:
    asked: dict[str, Any] = {"margin_pct": 0.5, "max_pairs": 18, "looks": 3}
    clocks = ClockMonitor("cpu")
    return plant(engine, engine.delayed, WORKLOAD, clocks=clocks, **asked | options)  # type: ignore[arg-type]


def test_what_is_planted_is_found() -> None:
    said: list[str] = []
    engine = DelayedEngine()
    found = planted(engine, progress=lambda phase, stage, done, total: said.append(stage))
    assert found.all_found
    assert not found.wrong
    assert [one.asked_pct for one in found.planted] == [1.0, 0.5, -1.0]
    for one in found.planted:
        assert one.planted_pct == pytest.approx(one.asked_pct, abs=0.02)
        assert one.comparison.gain_pct == pytest.approx(one.planted_pct, abs=0.15)
        assert one.control is not None
        assert abs(one.control.gain_pct) < 0.2
    assert [one.comparison.margin_pct for one in found.planted] == [0.5, 0.0, 0.0]
    assert [one.comparison.verdict for one in found.planted] == ["accept", "accept", "reject"]
    assert engine.delay_s == 0
    assert {stage.split(":")[0] for stage in said} == {
        "planted +1 %",
        "planted +0.5 %",
        "planted -1 %",
    }
    assert PlantedGains.model_validate_json(found.model_dump_json()) == found


def test_noise_that_hides_a_gain_is_not_found_and_not_wrong() -> None:
    found = planted(DelayedEngine(noise_pct=10), max_pairs=9)
    assert not found.all_found
    assert not found.wrong
    assert {one.found for one in found.planted} == {"not found"}
    assert all(one.pairs_needed and one.pairs_needed > 100 for one in found.planted)


def test_a_measurement_the_wrong_way_round_is_noticed() -> None:
    found = planted(DelayedEngine(inverted=True))
    assert found.wrong
    assert {one.found for one in found.planted} == {"wrong"}
    assert not any(one.holds for one in found.planted)


def test_a_step_is_calibrated_without_the_delay() -> None:
    assert step_seconds(DelayedEngine(), 0) == pytest.approx(0.01, rel=0.01)  # type: ignore[arg-type]


def test_the_delay_runs_once_a_call_and_is_taken_out() -> None:
    model = torch.nn.Identity()
    delayed = model_delay(model)
    with delayed(0.0):
        assert len(model._forward_pre_hooks) == 1
        assert model(torch.ones(1)) == 1
    assert not model._forward_pre_hooks

    def fail() -> None:
        with delayed(0.0):
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fail()
    assert not model._forward_pre_hooks
