"""Bytes of buffer sets: written once, where the runner reads them, over whatever was there."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from patcher import bench
from patcher.bench.judge import cases, memory_file
from patcher.bench.judge.blob import FILL, Wanted, holds, layout, write_set, write_slot
from patcher.bench.judge.cases import Case, Secrets, correctness_cases
from patcher.bench.judge.memory_file import SentSets, SharedSets
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.runner.captured import Arena
from patcher.bench.runner.mixing import Mixer

OP = bench.load_op("moe_matmul_down")
POINT = OP.sweep("cpu").points()[-1]
GARBAGE = 0x5A
PLACES = [
    Wanted(name="a", dtype="float32", shape=(3, 5)),
    Wanted(name="a", dtype="float32", shape=(3, 5), strides=(13, 1)),
    Wanted(name="a", dtype="float32", shape=(3, 5), strides=(1, 3)),
    Wanted(name="a", dtype="bfloat16", shape=(2, 7), strides=(8, 1), shift=1),
    Wanted(name="a", dtype="bfloat16", shape=(7,), shift=1),
    Wanted(name="a", dtype="int64", shape=()),
    Wanted(name="a", dtype="float16", shape=(0, 4)),
    Wanted(name="a", dtype="float4_e2m1fn_x2", shape=(3, 4), strides=(9, 1)),
]


@pytest.fixture
def sent() -> Iterator[SentSets]:
    descriptor = memory_file.memory_file("inputs")
    found = SentSets(descriptor)
    yield found
    found.close()
    os.close(descriptor)


@pytest.mark.parametrize("wanted", PLACES, ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_a_slot_is_its_value_and_poison_whatever_it_held(wanted: Wanted, known: bool) -> None:
    around = [Wanted(name=name, dtype="uint8", shape=(40,)) for name in "bc"]
    plan = layout([around[0], wanted, around[1]])
    slot = plan.slots[1]
    drawn = torch.arange(1, 1 + 8 * max(np.prod(wanted.shape, dtype=int), 1), dtype=torch.uint8)
    right = np.full(plan.set_bytes, GARBAGE, dtype=np.uint8)
    right[slot.offset : slot.offset + slot.slot_bytes] = FILL
    view = slot.view(torch.from_numpy(right))
    narrow = view.view(torch.uint8) if view.element_size() == 1 else view
    value = drawn[: view.numel() * view.element_size()].view(view.dtype).view(view.shape)
    if known and view.numel():
        narrow.copy_(value.view(narrow.dtype))
    block = np.full(plan.set_bytes, GARBAGE, dtype=np.uint8)
    write_slot(slot, block, value if known else None)
    assert np.array_equal(block, right)


def test_a_set_is_filled_to_its_end_and_no_further() -> None:
    plan = layout(
        [
            Wanted(name="x", dtype="float32", shape=(4, 4), travel="checked"),
            Wanted(name="m", dtype="float32", shape=(8,), travel="mixed"),
            Wanted(name="out", dtype="float32", shape=(4, 4)),
        ]
    )
    values = {"x": torch.zeros(4, 4)}
    for end in (plan.returned_bytes, plan.sent_bytes):
        held = np.full(plan.set_bytes, GARBAGE, dtype=np.uint8)
        write_set(plan, held[:end], values)
        assert not (held[:end] == GARBAGE).any()
        assert (held[end:] == GARBAGE).all()


def test_a_change_in_a_slot_or_around_it_tells() -> None:
    plan = layout([Wanted(name="a", dtype="float32", shape=(5, 5))])
    [slot], value = plan.slots, torch.randn(5, 5)
    value[0, 0] = torch.nan  # bytes count, not numbers
    block = np.empty(plan.set_bytes, dtype=np.uint8)
    write_slot(slot, block, value)
    assert holds(slot, block, value)
    for at in (
        0,
        slot.begin - 1,
        slot.begin,
        slot.begin + slot.span_bytes - 1,
        slot.slot_bytes - 1,
    ):
        touched = block.copy()
        touched[at] ^= 1
        assert not holds(slot, touched, value), at


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MIXED_BYTES", 1 << 10)
    monkeypatch.setattr(cases, "CHECKED_BYTES", 1 << 8)


def test_a_runner_on_a_gpu_finds_all_values_of_every_case(
    small_is_large: None, sent: SentSets
) -> None:
    """One file for all of them, so that each lies over what another left."""
    draw, sweep = Secrets(2), OP.sweep("cpu")
    pool = RandomPool(OP, sweep, "cpu", draw)
    read = mmap.mmap(sent._file, 0, flags=mmap.MAP_PRIVATE)  # as the runner maps it
    address = ctypes.addressof(ctypes.c_char.from_buffer(read))
    travels = set[str]()
    for case in correctness_cases(OP, sweep, draw):
        for count in (1, 2):
            sets = CallSets.made(OP, [case] * count, "cpu", pool)
            sets.write(sent.rows(count, sets.plan.sent_bytes))
            arena = Arena(sets.plan.model_dump(), count, device="cpu")
            arena.bytes.fill_(GARBAGE)
            for here, host, size in arena.pieces(address, arena.sent):
                ctypes.memmove(here, host, size)
            arena.recipes = sets.recipes
            arena.mix(Mixer(), pool.bits)
            for index, (values, arguments) in enumerate(
                zip(sets.inputs, arena.arguments, strict=True)
            ):
                for slot, argument in zip(sets.plan.slots, arguments, strict=True):
                    travels.add(slot.travel)
                    tensor = next(t for t in OP.contract.tensors if t.name == slot.name)
                    if tensor.access == "write":
                        assert argument.isnan().all()
                        continue
                    mine = values[slot.name].reshape(-1).view(torch.uint8)
                    assert torch.equal(argument.reshape(-1).view(torch.uint8), mine), slot.name
                back = arena.block(index).numpy()[: sets.plan.returned_bytes]
                assert np.array_equal(back, sets.data[index])
            digests = [sets.digests(values, 3) for values in sets.inputs]
            assert arena.digests(Mixer(), 3) == digests
    assert travels == {"bytes", "checked", "mixed"}


def test_only_the_sets_that_are_named_are_filled(small_is_large: None) -> None:
    draw = Secrets(2)
    pool = RandomPool(OP, OP.sweep("cpu"), "cpu", draw)
    sets = CallSets.made(OP, [Case(POINT, "normal", seed, ()) for seed in (1, 2, 3)], "cpu", pool)
    shared = SharedSets(memory_file.memory_file("outputs", 1 << 30))
    rows = shared.rows(sets.plan, 3)
    rows[:] = GARBAGE
    sets.write(rows, slice(1, 2))
    assert (rows[0] == GARBAGE).all()
    assert (rows[2] == GARBAGE).all()
    for slot in sets.plan.watched:
        assert holds(slot, rows[1], sets.inputs[1][slot.name])
    assert np.array_equal(rows[1, : sets.plan.returned_bytes], sets.data[1])


def test_what_the_judge_compares_with_is_not_what_the_runner_maps(
    small_is_large: None, sent: SentSets
) -> None:
    pool = RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(2))
    sets = CallSets.made(OP, [Case(POINT, "normal", 1, ())], "cpu", pool)
    rows = sent.rows(1, sets.plan.sent_bytes)
    sets.write(rows)
    held, values = sets.data.copy(), {k: v.clone() for k, v in sets.inputs[0].items()}
    rows[:] = GARBAGE
    assert np.array_equal(sets.data, held)
    assert all(
        torch.equal(v.view(torch.uint8), values[k].view(torch.uint8))
        for k, v in sets.inputs[0].items()
    )


def test_more_than_one_command_may_have_is_refused(
    sent: SentSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_file, "CAPACITY", 1000)
    assert sent.rows(2, 500).shape == (2, 500)
    with pytest.raises(ValueError, match="1002 bytes for one command, at most 1000 allowed"):
        sent.rows(2, 501)
