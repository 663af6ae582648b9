"""Decode steps found in a sequence of kernels, and the steady state cut out by them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patcher.hotspot.rank import build_profile
from patcher.hotspot.recording import Launches, Recording
from patcher.hotspot.steps import find_steps
from patcher.hotspot.timeline import busy_time, exposed, gaps

LAYER = ["qkv", "rope", "kv", "attention", "out", "norm", "router", "topk", "up", "down", "sum"]
STEP = ["embed", *LAYER * 12, "head", "argmax"]
LONG = {"up": 40_000, "down": 25_000, "head": 260_000, "attention": 12_000, "load": 90_000}


def trace(names: Sequence[str], stream: Sequence[int] | None = None, seed: int = 0) -> Launches:
    """Kernels one after the other; a step's first waits longest."""
    draw = random.Random(seed)
    texts = tuple(dict.fromkeys(names))
    starts, ends, now = [], [], 0
    for name in names:
        now += 30_000 if name == "embed" else draw.randint(200, 600)
        starts.append(now)
        now += int(LONG.get(name, 2_000) * draw.uniform(0.95, 1.05))
        ends.append(now)
    codes = [texts.index(name) for name in names]
    return Launches(
        texts,
        np.array(codes, np.int32),
        np.array(starts, np.int64),
        np.array(ends, np.int64),
        np.zeros(len(names), np.int32),
        np.array(stream if stream is not None else [7] * len(names), np.int32),
    )


def found(names: Sequence[str]) -> int | None:
    steps = find_steps(trace(names))
    return None if steps is None else len(steps.bounds)


def test_steps_are_told_by_what_repeats_and_not_by_layers() -> None:
    steps = find_steps(trace(STEP * 20))
    assert steps is not None
    assert len(steps.bounds) == 20
    assert steps.source == f"the sequence of {len(STEP)} kernels that repeats"
    assert (steps.bounds[1:, 0] == steps.bounds[:-1, 1]).all()


def test_a_step_begins_where_the_gpu_waited() -> None:
    launches = trace(STEP * 20)
    steps = find_steps(launches)
    assert steps is not None
    first = np.searchsorted(launches.start, steps.bounds[:, 0])
    assert {launches.texts[launches.name[index]] for index in first} == {"embed"}


def test_loading_warm_up_and_prefill_do_not_count() -> None:
    load = ["load", "fill"] * 200
    prefill = ["embed", *["qkv_large", "attention_large", "up_large"] * 12, "head", "argmax"]
    names = [*load, *prefill, *STEP * 30, *prefill, *STEP * 10]
    profile = build_profile(Recording("a test", launches=trace(names)), "m")
    assert profile.steps == 40
    assert not {"load", "fill", "up_large"} & {kernel.name for kernel in profile.kernels}
    assert {kernel.name: kernel.instances for kernel in profile.kernels}["up"] == 40 * 12
    assert profile.window is not None
    assert "lies outside" in profile.window
    everything = build_profile(Recording("a test", launches=trace(names)), "m", window="all")
    assert "load" in {kernel.name for kernel in everything.kernels}
    assert everything.window == "everything in the source"


def test_now_and_then_an_engine_does_something_beside_the_step() -> None:
    draw = random.Random(1)
    names: list[str] = []
    for _ in range(64):
        step = list(STEP)
        if draw.random() < 0.2:
            step.insert(draw.randrange(1, len(step)), "block_table")
        names += step
    assert found(names) == 64


def test_what_does_not_repeat_has_no_steps() -> None:
    draw = random.Random(2)
    names = [f"kernel_{draw.randrange(50)}" for _ in range(5000)]
    profile = build_profile(Recording("a test", launches=trace(names)), "m")
    assert profile.steps is None
    assert [warning.kind for warning in profile.warnings] == ["steps_unknown"]
    assert sum(kernel.instances for kernel in profile.kernels) == 5000


def test_a_second_stream_does_not_hide_the_period() -> None:
    names, streams = [], []
    draw = random.Random(3)
    for name in STEP * 20:
        names.append(name)
        streams.append(7)
        if draw.random() < 0.1:
            names.append("prefetch")
            streams.append(9)
    profile = build_profile(Recording("a test", launches=trace(names, streams)), "m")
    assert profile.steps == 20


@settings(max_examples=60, deadline=None)
@given(
    layer=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=9),
    layers=st.integers(2, 30),
    repeats=st.integers(4, 12),
    before=st.integers(0, 200),
)
def test_any_step_of_layers_is_found(
    layer: list[str], layers: int, repeats: int, before: int
) -> None:
    step = ["embed", *layer * layers, "head"]
    assert found([*["load"] * before, *step * repeats]) == repeats


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_very_short_traces(count: int) -> None:
    assert found(["k"] * count) is None


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(intervals)
def test_exposed_time_adds_up_to_the_union(pairs: list[tuple[int, int]]) -> None:
    pairs = sorted(pairs, key=lambda pair: pair[0])
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = np.array([start + length for start, length in pairs], dtype=np.int64)
    covered = {unit for start, length in pairs for unit in range(start, start + length)}
    own = exposed(starts, ends)
    assert own.sum() == len(covered) == busy_time(starts, ends)
    assert (own >= 0).all()
    assert (own <= ends - starts).all()
    if pairs:
        assert gaps(starts, ends).sum() + len(covered) == ends.max() - starts.min()


def test_a_kernel_that_waits_for_the_one_before_is_not_charged_for_it() -> None:
    starts, ends = np.array([0, 80, 100]), np.array([100, 150, 120])
    assert exposed(starts, ends).tolist() == [100, 50, 0]
