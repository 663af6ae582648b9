"""One arm on a GPU: what its commands read, and what replies may say."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patcher import bench
from patcher.bench.judge.cases import Secrets
from patcher.bench.judge.process import Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.timed_arm import TimedArm, WrongCall, fresh_sets, timing_method
from patcher.bench.judge.zygote import RunnerFailure, environment

OP = bench.load_op("fused_add_rms_norm")
READS = {"call", "ready", "capture", "compose", "spans"}
RIGHT: dict[str, Any] = {"persisting_bytes": 0, "times_ns": [1e3], "fingerprint": 0, "sum": 7}
RIGHT["spans"] = [["x", 5, 9]]
ODD = (None, 3, [[]], ["x"], [{}], [10**400], [math.nan], [-1], "ab", [1, 1], [["a", 1, 1]])


class Process:
    """What it gives lies over what it reads."""

    reply_s, left = 0.001, Runner.left

    def __init__(self, pool: RandomPool, **replies: Any) -> None:
        self.memory = torch.zeros(1 << 20, dtype=torch.uint8)
        self.gpu_sets = SimpleNamespace(
            sent=lambda n, size: self.memory[: n * size].view(n, size),
            given=lambda n, size, key: (torch.zeros(n, size, dtype=torch.uint8), 7),
        )
        self.replies, self.found = replies, dict[str, bool]()
        self.sets = fresh_sets(OP, OP.sweep("cpu").points()[0], 2, "cpu", pool, Secrets(2))
        runner: Any = self
        self.arm = TimedArm(OP, "cuda", runner, pool, checked=True)

    def command(self, do: str, _limit: float = 0, **_: Any) -> dict[str, Any]:
        there = self.gpu_sets.sent(2, self.sets.plan.sent_bytes)
        right = torch.zeros_like(there)
        self.sets.write(right)
        self.found[do] = self.found.get(do, True) and torch.equal(there, right)
        if do in ("call", "go", "collect"):
            self.memory.fill_(0x5C)
        return dict(self.replies.get(do, RIGHT))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> RandomPool:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(1))


def test_each_command_finds_what_was_sent(pool: RandomPool) -> None:
    process = Process(pool)
    process.arm.prepare(process.sets, 5)
    for mode in ("whole", "eager", "cold"):
        process.arm.block(process.sets, [1], mode)
    assert process.arm.spans(process.sets, [0, 1], 5) == ([("x", 5, 9)], 2000)
    assert {do for do, right in process.found.items() if right} >= READS


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["times_ns", "spans"])
def test_times_and_spans_may_be_anything(pool: RandomPool, name: str, odd: Any) -> None:
    without = {key: each for key, each in RIGHT.items() if key != name}
    for reply in ({**without, name: odd}, without):
        process = Process(pool, launch=reply, go=reply, spans=reply)
        with pytest.raises(RunnerFailure):
            process.arm.spans(process.sets, [0], 5)
        if name == "times_ns":
            with pytest.raises(RunnerFailure):
                process.arm.block(process.sets, [0])


def test_other_odd_replies_are_no_crash(pool: RandomPool) -> None:
    process = Process(pool, capture={"persisting_bytes": "\udcff" * 100}, launch={"times_ns": [9]})
    with pytest.raises(WrongCall) as found:
        process.arm.prepare(process.sets, 5)
    assert len(found.value.detail.encode()) < 200
    with pytest.raises(WrongCall, match="said to end"):
        process.arm.block(process.sets, [0])
    for process.replies["collect"] in ({}, {"sum": 8}):
        with pytest.raises(RunnerFailure, match="outputs changed"):
            process.arm.block(process.sets, [0])


def test_runners_number_gpus_as_the_judge_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert "CUDA_DEVICE_ORDER" in environment(tmp_path, "cuda")


def test_a_verdict_says_why_sets_go_through_files() -> None:
    shared, files = (
        SimpleNamespace(gpu_sets=SimpleNamespace(unshared=why)) for why in ("", "not supported")
    )
    one: Any = shared
    other: Any = files
    assert "files" not in timing_method("cuda", one, one)
    said = "; sets through files in memory: not supported"
    assert timing_method("cuda", one, other) == timing_method("cuda", one) + said
