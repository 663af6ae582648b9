"""The steps that engines name, with their phases, and what is ranked of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces_sample import EPOCH, kernel, mark, steps, write_trace

from patcher.hotspot import read
from patcher.hotspot.marks import Mark, mark_of

MARKS: dict[str, Mark | None] = {
    "execute_context_0(0)_generation_8(8)": Mark(0, "decode"),
    "execute_context_2(1024)_generation_0(0)": Mark(0, "prefill"),
    "execute_context_1(512)_generation_7(7)": Mark(0, "mixed"),
    "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk9sqsq32sqsk9)": Mark(0, "decode"),
    "execute_context_0(0)_generation_0(0)": Mark(0, None),
    "execute_new_0_cached_8": Mark(0, "decode"),
    "execute_new_2_cached_0": Mark(0, "prefill"),
    "execute_new_2_cached_8": Mark(0, "mixed"),
    "execute_new_requests": None,
    "[Executor] _forward_step 7: 0 ctx reqs, 0 ctx tokens, 32 gen reqs": Mark(0, "decode"),
    "[Executor] _forward_step 7: 2 ctx reqs, 32 gen reqs": Mark(0, "mixed"),
    "[Executor] _forward_step: 2 ctx reqs, 0 gen reqs": Mark(0, "prefill"),
    "_forward_step": None,
    "step[DECODE bs=32]": Mark(0, "decode"),
    "step[EXTEND bs=1 toks=512]": Mark(0, "prefill"),
    "step[SPLIT_PREFILL bs=1]": Mark(0, "prefill"),
    "step[MIXED bs=4 forward_id=7]": Mark(0, "mixed"),
    "step[VERIFY bs=8]": Mark(0, "decode"),
    "step[DRAFT bs=8]": None,
    "step[DRAFT_LOOP raw_bs=3 bs=4 topk=1]": None,
    "step[IDLE bs=0]": None,
    "step": Mark(1, None),
    "Step 12": Mark(1, None),
    "decode_step": Mark(1, "decode"),
    "prefill step 3": Mark(1, "prefill"),
    "ProfilerStep#17": Mark(2, None),
    "Optimizer.step#SGD.step": None,
    "llm_engine step: get_output": None,
    "stepwise": None,
    "": None,
}


@pytest.mark.parametrize("text", MARKS)
def test_a_range_names_a_step_or_none(text: str) -> None:
    assert mark_of(text) == MARKS[text]


def test_a_prefill_alone_is_one_step_of_prefill(tmp_path: Path) -> None:
    """Its layers are no steps of decode."""
    layers = [kernel(f"k{at % 6}", EPOCH + 20 + 10 * at, 9.0, 5) for at in range(36 * 6)]
    own = [mark("execute_context_1(2048)_generation_0(0)", EPOCH, 40)]
    launch = steps([""])[0] | {"args": {"correlation": 5}}
    profile = read(write_trace(tmp_path / "t.json", [*own, launch, *layers]))
    assert (profile.steps, profile.phase) == (1, "prefill")
    assert profile.total_kernel_ns == 36 * 6 * 9_000
    assert profile.window is not None
    assert profile.window.startswith("1 prefill step")


def test_decode_is_ranked_and_the_rest_is_said(tmp_path: Path) -> None:
    texts = ["step[EXTEND bs=1 toks=9]", *["step[DECODE bs=8]"] * 3, "step[MIXED bs=8]"]
    profile = read(write_trace(tmp_path / "t.json", steps(texts)))
    assert (profile.steps, profile.phase) == (3, "decode")
    assert profile.total_kernel_ns == 3 * 52_250
    assert profile.window is not None
    assert "1 prefill, 1 mixed steps" in profile.window
    everything = read(tmp_path / "t.json", window="all")
    assert everything.total_kernel_ns == 5 * 52_250


def test_mixed_steps_alone_are_said_to_be_mixed(tmp_path: Path) -> None:
    texts = ["execute_context_1(512)_generation_7(7)"] * 2
    profile = read(write_trace(tmp_path / "t.json", steps(texts)))
    assert (profile.steps, profile.phase) == (2, "mixed")


def test_a_draft_belongs_to_the_verification_before_it(tmp_path: Path) -> None:
    texts = ["step[VERIFY bs=8]", "step[DRAFT bs=8]"] * 3
    profile = read(write_trace(tmp_path / "t.json", steps(texts)))
    assert (profile.steps, profile.phase) == (3, "decode")
    assert profile.total_kernel_ns == 6 * 52_250
    assert {spot.per_step for spot in profile.hotspots if spot.kind == "kernel"} == {2}


@pytest.mark.parametrize("count", [2, 8])
def test_what_follows_a_steps_range_belongs_to_the_last_step_too(
    count: int, tmp_path: Path
) -> None:
    """vLLM samples after the range of its step; what follows once is another thing's."""
    texts = ["execute_context_0(0)_generation_8(8)", ""] * count
    other = [kernel("another", EPOCH + 9000, 40.0)]
    profile = read(write_trace(tmp_path / "t.json", [*steps(texts), *other]))
    assert (profile.steps, profile.total_kernel_ns) == (count, 2 * count * 52_250)
    strange = steps(texts[:-1])
    profile = read(write_trace(tmp_path / "t.json", [*strange, *other]))
    assert (profile.steps, profile.total_kernel_ns) == (count, (2 * count - 1) * 52_250)


def test_given_steps_count(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", steps(["step"] * 4))
    profile = read(path, steps=2)
    assert profile.steps == 2
    [warning] = [w for w in profile.warnings if w.kind == "steps_unknown"]
    assert warning.message == "the source names 4 steps; 2 were given and count"
    assert profile.hotspots[0].per_step == 2


def test_a_repeating_sequence_that_contradicts_the_given_steps_is_not_cut(tmp_path: Path) -> None:
    own = [kernel(f"k{at % 4}", EPOCH + 10 * at, 9.0) for at in range(40)]
    path = write_trace(tmp_path / "t.json", own)
    assert read(path).steps == 10
    told = read(path, steps=1)
    assert (told.steps, told.total_kernel_ns) == (1, 360_000)
    assert [w.kind for w in told.warnings] == ["steps_unknown"]
