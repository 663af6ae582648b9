"""Windows at other batch sizes and context lengths, in one process and in blocks of processes."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_sample import WORKLOAD, ScriptedEngine, decided, evidence
from process_doubles import Host, ScriptedProcess, ScriptedSide
from rich.console import Console

from patcher import bench
from patcher.ab.job import ABJob
from patcher.ab.other_windows import (
    OtherWindows,
    other_shapes,
    peak_memory,
    peak_of_arms,
    planned,
    take_in_one_process,
)
from patcher.ab.session import PATCHED, PatchSession
from patcher.bench import Shape
from patcher.bench.ab.engine_config import ConfigTrial
from patcher.bench.ab.phases import silent
from patcher.bench.ab.processes import ABPlan
from patcher.bench.ab.windows import Taken
from patcher.bench.machine.clocks import ClockMonitor, ClockSample
from patcher.bench.stats.comparison import Arm
from patcher.show.throughput import other_workload_lines

SHAPES = (Shape(batch=1, context=4), Shape(batch=16, context=4), Shape(batch=2, context=64))
JOB = ABJob(workload=WORKLOAD, other_workloads=SHAPES, process_pairs=3)


class ShapedSide(ScriptedSide):
    def __init__(self, process: ShapedProcess, shape: Shape | None) -> None:
        super().__init__(process)
        self.batch = WORKLOAD.batch if shape is None else shape.batch
        # at many sequences the patched kernel is the slower one
        self.penalty = 1.05 if self.batch > 8 and process.arm == "patched" else 1.0

    def end(self) -> Taken:
        taken = super().end()
        return taken._replace(
            tokens=[[1] * (1 + self.steps)] * self.batch, decode_s=taken.decode_s * self.penalty
        )


class ShapedProcess(ScriptedProcess):
    def side(self, shape: Shape | None = None) -> ShapedSide:
        return ShapedSide(self, shape)


class ShapedHost(Host):
    def start(self, name: str, share: float) -> ShapedProcess:
        made = super().start(name, share)
        made.__class__ = ShapedProcess
        assert isinstance(made, ShapedProcess)
        return made


def measured(host: Host, folder: Path) -> OtherWindows:
    """As `PatchSession` takes them, of processes that are asked for nothing else."""
    ScriptedSide.seeds = []
    session: Any = PatchSession(JOB, {PATCHED: ()}, folder)
    session.launcher = host
    session.ask = lambda *asked: None
    assert session.take(ABPlan(process_pairs=3, pairs=4), ClockMonitor("cpu"), silent)
    windows = [w for one in session.taken for own in one.block.windows.values() for w in own]
    assert {w.tokens for w in windows} == {WORKLOAD.batch * (WORKLOAD.output_len - 2)}
    assert not host.open
    other: OtherWindows = session.other_windows(PATCHED)
    return other


@pytest.mark.parametrize("total", [100, 15], ids=["beside each other", "one at a time"])
def test_a_loss_at_another_batch_is_found_in_process_pairs(total: int, tmp_path: Path) -> None:
    found = measured(ShapedHost(bias_pct=0.02, total=total), tmp_path).found(None)
    assert found is not None
    assert [(one.batch, one.context) for one in found.points] == [(1, 4), (16, 4), (2, 64)]
    assert [found.standing(one) for one in found.points] == ["within", "worse", "within"]
    for point in found.points:
        pairs = 24 if point.batch == 1 else 12
        assert (point.comparison.pairs, point.comparison.process_pairs) == (pairs, 3)
        assert point.comparison.dropped_pairs == 3
        assert {window.tokens for window in point.windows} == {point.batch * 14}
    decision = decided(**evidence(), other_workloads=found)
    assert decision.verdict == "reject"
    assert "slower at batch 16, context 4" in decision.reasons[0]
    console = Console(width=160, record=True, file=io.StringIO())
    for shown in other_workload_lines(found):
        console.print(shown)
    text = console.export_text()
    for said in ("batch", "worse", "it is slower at batch 16"):
        assert said in text, said


def test_no_prompts_of_the_workload_come_again_elsewhere(tmp_path: Path) -> None:
    measured(ShapedHost(), tmp_path)
    by_seed: dict[int, list[Arm]] = {}
    for seed, arm in ScriptedSide.seeds:
        by_seed.setdefault(seed, []).append(arm)
    assert {len(arms) for arms in by_seed.values()} == {2}


class ShapedEngine(ScriptedEngine):
    """Tokens of the batch that it is given."""

    def prefill(self, prompts: torch.Tensor) -> Any:
        decoding = super().prefill(prompts)
        return bench_decoding(decoding, prompts)

    def decode(self, decoding: Any, steps: int) -> None:
        begun = len(decoding.picked)
        super().decode(decoding, steps)
        rows = decoding.cache
        decoding.picked[begun:] = [token[:1].expand(rows, 1) for token in decoding.picked[begun:]]


def bench_decoding(decoding: Any, prompts: torch.Tensor) -> Any:
    decoding.cache = len(prompts)
    decoding.picked = [torch.zeros(len(prompts), 1, dtype=torch.long)]
    return decoding


def test_one_process_takes_the_same_points() -> None:
    engine = ShapedEngine(3.0)
    job = JOB.model_copy(update={"process_pairs": 0})
    arms: dict[Arm, Any] = {"baseline": nullcontext, "patched": engine.patch}
    found = take_in_one_process(job, engine, arms, None, ClockMonitor("cpu"), silent).found(None)
    assert found is not None
    assert not found.failures + found.unknown
    for point in found.points:
        assert point.comparison.pairs == 12
        assert point.comparison.gain_pct == pytest.approx(3.0, abs=0.3)
    assert peak_of_arms(engine, arms) == {}


def test_points_without_a_usable_pair_keep_an_accept_back() -> None:
    class Hot(ClockMonitor):
        def sample(self) -> ClockSample:
            return ClockSample(sm_mhz=1980, throttle=("hardware slowdown",))

    engine = ShapedEngine(3.0)
    arms: dict[Arm, Any] = {"baseline": nullcontext, "patched": engine.patch}
    found = take_in_one_process(JOB, engine, arms, None, Hot("cpu"), silent).found(None)
    assert found is not None
    assert not found.points
    assert found.unknown[0] == "at batch 1, context 4 no pair is usable"
    assert decided(**evidence(), other_workloads=found).verdict == "inconclusive"


def test_which_points_are_asked_for() -> None:
    load = WORKLOAD.model_copy(update={"batch": 8, "input_len": 1024})
    assert other_shapes(load, False, None, None) == ()
    own = [(shape.batch, shape.context) for shape in other_shapes(load, True, None, None)]
    assert own == [(1, 1024), (64, 1024), (8, 4096), (8, 8192)]
    some = other_shapes(load, False, "1, 8,64", "1024,8192")
    assert [(s.batch, s.context) for s in some] == [(1, 1024), (64, 1024), (8, 8192)]
    assert [s.batch for s in other_shapes(load, False, "2", None)] == [2]
    assert len(other_shapes(load, True, "2", None)) == 3
    for text in ("two", "0", "1;2", "-1", "", ","):
        with pytest.raises(bench.UsageError, match="--also-batch"):
            other_shapes(load, False, text, None)


def test_memory_is_told_of_a_gpu_alone() -> None:
    both: dict[Arm, int] = {"baseline": 100, "patched": 103}
    assert peak_memory(both, "cpu") is None
    assert peak_memory({"baseline": 100}, "cuda") is None
    found = OtherWindows(()).found(peak_memory(both, "cuda"))
    assert found is not None
    assert "peak memory grows by 3.00 %" in found.failures[0]
    assert OtherWindows(()).found(None) is None


def test_files_keep_the_name_that_the_field_had() -> None:
    written = JOB.model_dump(mode="json")
    assert [one["batch"] for one in written["elsewhere"]] == [1, 16, 2]
    assert "other_workloads" not in written
    assert ABJob.model_validate(written) == JOB
    tried = ConfigTrial.model_validate({"arguments": {}, "tokens_per_s": 1.0, "elsewhere": []})
    assert tried.other_workloads == ()
    assert "elsewhere" in tried.model_dump_json()


def test_small_batches_have_more_pairs_and_no_pair_has_anothers_number() -> None:
    shapes = (Shape(batch=1, context=8), Shape(batch=4, context=8), Shape(batch=64, context=8))
    workload = WORKLOAD.model_copy(update={"batch": 8})
    job = JOB.model_copy(update={"workload": workload, "other_workloads": shapes})
    blocks = [[numbers for _, numbers, _ in planned(job, block)] for block in (0, 1, 2)]
    assert [len(numbers) for numbers in blocks[0]] == [17, 9, 5]
    known = [number for block in blocks for numbers in block for number in numbers]
    assert len(known) == len(set(known)) == 3 * 31
    assert [len(numbers) for _, numbers, _ in planned(job, None)] == [13, 13, 13]
