"""What this machine can do at best, and when a time below it accuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from patcher.bench import Language, Outcome, load_op
from patcher.bench.judge import JudgeSettings, open_judge
from patcher.bench.judge import ceilings as module
from patcher.bench.judge.ceilings import SLACK, Ceilings, ceilings
from patcher.bench.judge.clockcheck import TimedBlock, below_floor


def blocks(call_us: float) -> list[TimedBlock]:
    return [TimedBlock([call_us], 24, 24 * call_us)] * 12


def test_no_call_is_accused_where_copies_in_the_cache_were_held_up() -> None:
    """A busy machine launched them at 1,800 GB/s: an honest matmul at 2,700 was no violation."""
    op = load_op("moe_matmul_swiglu")
    point = op.sweep("cuda").points()[-1]
    at_best = Ceilings(
        device="a GPU", memory_gb_s=4000, cached_gb_s=9000, flops={"bf16": 7e14}, launch_us=1.2
    )
    held_up = at_best.model_copy(update={"cached_gb_s": 1800})
    honest_us = op.contract.bytes_moved(point) / 2700e3
    for known in (at_best, held_up):
        floor_us = known.floor_us(op.contract, point)
        assert below_floor(blocks(honest_us), floor_us) is None
        assert below_floor(blocks(floor_us / 2), floor_us)


def test_arithmetic_that_another_formula_avoids_makes_no_time_too_short() -> None:
    """A sum over a product's columns was made without the product, and accused."""
    contract = load_op("linear").contract
    rewritable = contract.model_copy(
        update={"cost": contract.cost.model_copy(update={"rewritable": True})}
    )
    axes = {"tokens": 1024, "inner": 8192, "outer": 8192, "biased": 0}
    point = load_op("linear").sweep("cuda").points()[-1].model_copy(update={"axes": axes})
    known = Ceilings(
        device="a GPU", memory_gb_s=4300, cached_gb_s=9000, flops={"bf16": 7.8e14}, launch_us=1.2
    )
    moved_us = contract.bytes_moved(point) / 9000e3 / SLACK
    assert known.floor_us(contract, point) == pytest.approx(
        1e6 * contract.flops(point) / 7.8e14 / SLACK
    )
    assert known.floor_us(rewritable, point) == pytest.approx(moved_us)
    assert known.sol_us(rewritable, point) == known.sol_us(contract, point)
    computed_us = 1e6 * contract.flops(point) / 7.8e14
    assert known.sol_pct(rewritable, point, 2 * computed_us) == pytest.approx(50)
    assert known.sol_pct(contract, point, computed_us / 2) == pytest.approx(200)
    less = known.sol_pct(rewritable, point, computed_us / 2)
    assert less == pytest.approx(200 * contract.bytes_moved(point) / 4300e3 / computed_us)
    assert less < 100


def test_narrow_numbers_may_be_multiplied_faster_than_was_measured() -> None:
    """An honest fp8 matmul was below a floor of bfloat16's rate, and accused."""
    known = Ceilings(
        device="a GPU", memory_gb_s=4300, cached_gb_s=9000, flops={"bf16": 7.8e14}, launch_us=1.2
    )
    contract = load_op("linear_fp8").contract
    point = load_op("linear_fp8").sweep("cuda").points()[-1]
    axes = {**point.axes, "tokens": 4096, "blocks": 64, "block": 128, "outer": 8192}
    point = point.model_copy(update={"axes": axes})
    alone_us = 1e6 * contract.flops(point) / 7.8e14
    assert known.floor_us(contract, point) == pytest.approx(alone_us / 2 / SLACK)
    assert known.sol_us(contract, point) == pytest.approx(alone_us / 2)


def test_ceilings_that_a_busy_machine_gave_accuse_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were remembered, and six right kernels of six came to be guard violations."""
    monkeypatch.setattr(module, "cache_root", lambda: tmp_path)
    true = ceilings("cpu", 1)
    assert set(true.flops) == {"bfloat16", "float32"}
    [file] = (tmp_path / "ceilings").iterdir()
    rates = {name: rate / 1e4 for name, rate in true.flops.items()}
    low = {"cached_gb_s": true.cached_gb_s / 1e4, "memory_gb_s": true.memory_gb_s / 1e4}
    file.write_text(true.model_copy(update={**low, "flops": rates}).model_dump_json())
    op = load_op("silu_and_mul")
    [(_, candidate)] = [
        (info, one) for info, one in op.solutions() if one.language is Language.TORCH
    ]
    settings = JudgeSettings(
        baseline="eager", pairs=3, points=1, threads=1, calls=20, lives_s=0.0, timeout_s=20
    )
    with open_judge(settings) as judge:
        told = judge.evaluate(candidate, lambda *_: None)
    assert told.outcome in (Outcome.CORRECT, Outcome.TOO_SLOW), told.failed_checks
    again = ceilings("cpu", 1)
    assert again.cached_gb_s > 1e3 * low["cached_gb_s"]
    assert again.flops["float32"] > 1e3 * rates["float32"]
