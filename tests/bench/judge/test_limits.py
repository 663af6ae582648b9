"""What a runner may take, and the compile workers that fit into it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from patcher import bench
from patcher.bench import Candidate, Language
from patcher.bench.judge.process import Runner
from patcher.bench.judge.zygote import (
    MOST_WORKERS,
    WORKER_BYTES,
    Limits,
    RunnerFailure,
    Zygote,
    placed,
)
from patcher.bench.toolchains import build

NAME = "TORCHINDUCTOR_COMPILE_THREADS"
NORM = bench.load_op("fused_add_rms_norm")
ASKS = """
from torch._inductor import config
def fused_add_rms_norm(*_):
    pass
raise RuntimeError(f"{config.compile_threads} workers")
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("cpu") as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)


@pytest.mark.parametrize(
    ("memory_gib", "cpus", "workers"),
    [(16, 32, 16), (16, 4, 4), (64, 96, MOST_WORKERS), (2, 32, 2), (0.5, 8, 1), (16, 1, 1)],
)
def test_workers_are_as_many_as_there_are_cpus_and_half_of_the_memory_has_room_for(
    memory_gib: float, cpus: int, workers: int
) -> None:
    limits = Limits(memory_bytes=int(memory_gib * 2**30))
    assert limits.compilers(range(cpus)) == {NAME: str(workers)}
    assert workers == 1 or 2 * workers * WORKER_BYTES <= limits.memory_bytes


def test_without_a_pinning_the_cpus_of_this_process_count() -> None:
    usable = len(os.sched_getaffinity(0))
    assert Limits(memory_bytes=1 << 40).compilers() == {NAME: str(min(usable, MOST_WORKERS))}


def test_what_the_user_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "40")
    assert Limits(memory_bytes=1 << 30).compilers(range(2)) == {NAME: "40"}


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(("chosen", "workers"), [(None, 2), ("7", 7)])
def test_inductor_in_a_runner_starts_as_many(
    zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
    trusted: bool,
    chosen: str | None,
    workers: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    if chosen is not None:
        monkeypatch.setenv(NAME, chosen)
    built = build(Candidate(op=NORM.name, language=Language.TORCH, source=ASKS), NORM.contract)
    limits = Limits(reply_s=60.0, memory_bytes=2 << 30)
    with Runner(zygote, limits, trusted=trusted) as runner:
        runner.start(1)
        path = str(placed(built, runner.folder))
        with pytest.raises(RunnerFailure, match=f"RuntimeError: {workers} workers"):
            runner.command("candidate", path=path, binding=built.binding, entry=NORM.name)
