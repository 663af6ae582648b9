"""Bytes of buffer sets: written once, where the runner reads them, over whatever was there."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_cuda import HostCuda

from patcher import bench
from patcher.bench.judge import cases, memory_file
from patcher.bench.judge.blob import FILL, Wanted, holds, layout, write_set, write_slot
from patcher.bench.judge.cases import Case, Secrets, correctness_cases, expect
from patcher.bench.judge.gpu_sets import GpuSets
from patcher.bench.judge.memory_file import Left, SharedSets
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.runner import mixing
from patcher.bench.runner.captured import Arena
from patcher.bench.runner.exchange import Exchange
from patcher.bench.runner.mixing import Mixer
from patcher.bench.runner.session import Session

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
def sent() -> Iterator[GpuSets]:
    descriptor = memory_file.memory_file("inputs")
    found = GpuSets(descriptor, descriptor, shared=False)
    yield found
    found.close()
    os.close(descriptor)


@pytest.mark.parametrize("wanted", PLACES, ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_a_slot_is_its_value_and_poison_whatever_it_held(wanted: Wanted, known: bool) -> None:
    around = [Wanted(name=name, dtype="uint8", shape=(40,)) for name in "bc"]
    plan = layout([around[0], wanted, around[1]])
    slot = plan.slots[1]
    drawn = torch.arange(1, 1 + 8 * max(math.prod(wanted.shape), 1), dtype=torch.uint8)
    right = torch.full((plan.set_bytes,), GARBAGE, dtype=torch.uint8)
    right[slot.offset : slot.offset + slot.slot_bytes] = FILL
    view = slot.view(right)
    narrow = view.view(torch.uint8) if view.element_size() == 1 else view
    value = drawn[: view.numel() * view.element_size()].view(view.dtype).view(view.shape)
    if known and view.numel():
        narrow.copy_(value.view(narrow.dtype))
    block = torch.full((plan.set_bytes,), GARBAGE, dtype=torch.uint8)
    write_slot(slot, block, value if known else None)
    assert torch.equal(block, right)


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
        held = torch.full((plan.set_bytes,), GARBAGE, dtype=torch.uint8)
        write_set(plan, held[:end], values)
        assert not (held[:end] == GARBAGE).any()
        assert (held[end:] == GARBAGE).all()


def test_a_change_in_a_slot_or_around_it_tells() -> None:
    plan = layout([Wanted(name="a", dtype="float32", shape=(5, 5))])
    [slot], value = plan.slots, torch.randn(5, 5)
    value[0, 0] = torch.nan  # bytes count, not numbers
    block = torch.empty(plan.set_bytes, dtype=torch.uint8)
    write_slot(slot, block, value)
    assert holds(slot, block, value)
    for at in (
        0,
        slot.begin - 1,
        slot.begin,
        slot.begin + slot.span_bytes - 1,
        slot.slot_bytes - 1,
    ):
        touched = block.clone()
        touched[at] ^= 1
        assert not holds(slot, touched, value), at


def fill(arena: Arena, sent: int, sets: CallSets, pool: RandomPool) -> None:
    """Poison and what was sent, as a runner on a GPU fills its sets."""
    cuda: Any = HostCuda()
    session = object.__new__(Session)
    session.cuda, session.mixer, session.stream = cuda, Mixer(), 0
    session.exchange = Exchange(cuda, 0, sent, (None, 0), None)
    session.stock = pool.bits
    session._fill(arena, sets.recipes)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MIXED_BYTES", 1 << 10)
    monkeypatch.setattr(cases, "CHECKED_BYTES", 1 << 8)


def test_a_runner_on_a_gpu_finds_all_values_of_every_case(
    small_is_large: None, sent: GpuSets
) -> None:
    """One file for all of them, so that each lies over what another left."""
    draw, sweep = Secrets(2), OP.sweep("cpu")
    pool = RandomPool(OP, sweep, "cpu", draw)
    read = mmap.mmap(sent._inputs, 0, flags=mmap.MAP_PRIVATE)  # as the runner maps it
    address = ctypes.addressof(ctypes.c_char.from_buffer(read))
    travels = set[str]()
    for case in correctness_cases(OP, sweep, draw):
        for count in (1, 2):
            sets = CallSets.made(OP, [case] * count, "cpu", pool)
            sets.write(sent.sent(count, sets.plan.sent_bytes))
            arena = Arena(sets.plan.model_dump(), count, device="cpu")
            arena.bytes.fill_(GARBAGE)
            fill(arena, address, sets, pool)
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
                back = arena.block(index)[: sets.plan.returned_bytes]
                poisoned = sets.plan.poisoned_bytes
                assert (back[:poisoned] == FILL).all()
                assert torch.equal(back[poisoned:], sets.data[index])
            digests = [sets.digests(values, 3) for values in sets.inputs]
            assert arena.digests(Mixer(), 3) == digests
    assert travels == {"poisoned", "bytes", "checked", "mixed"}


def test_only_the_sets_that_are_named_are_filled(small_is_large: None) -> None:
    draw = Secrets(2)
    pool = RandomPool(OP, OP.sweep("cpu"), "cpu", draw)
    sets = CallSets.made(OP, [Case(POINT, "normal", seed, ()) for seed in (1, 2, 3)], "cpu", pool)
    shared = SharedSets(memory_file.memory_file("outputs", 1 << 30))
    rows = shared.rows(sets.plan, 3)
    rows[:] = GARBAGE
    sets.write_whole(rows, slice(1, 2))
    assert (rows[0] == GARBAGE).all()
    assert (rows[2] == GARBAGE).all()
    for slot in sets.plan.watched:
        assert holds(slot, rows[1], sets.inputs[1][slot.name])
    poisoned = sets.plan.poisoned_bytes
    assert poisoned
    assert (rows[1, :poisoned] == FILL).all()
    assert torch.equal(rows[1, poisoned : sets.plan.returned_bytes], sets.data[1])


def test_what_is_only_written_is_not_sent_and_a_write_before_a_call_tells(
    small_is_large: None,
) -> None:
    pool = RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(2))
    sets = CallSets.made(OP, [Case(POINT, "normal", seed, ()) for seed in (1, 2)], "cpu", pool)
    [out] = [slot for slot in sets.plan.slots if slot.travel == "poisoned"]
    assert sets.plan.poisoned_bytes == out.slot_bytes
    assert sets.plan.carried_bytes == max(sets.plan.sent_bytes, sets.plan.returned_bytes)
    key, digests = 5, [sets.digests(values, 5) for values in sets.inputs]
    back = torch.full((2, sets.plan.returned_bytes), FILL, dtype=torch.uint8)
    back[:, sets.plan.poisoned_bytes :] = sets.data
    right = expect(OP, sets.cases[0], sets.inputs[0])
    write_slot(out, back[0], right.honest[out.name])
    assert sets.problem_with([right], Left(back, key, digests), [0]) is None
    for index, at, found in (
        (1, out.offset, "never made"),
        (1, out.begin + out.span_bytes // 2, "never made"),
        (1, sets.plan.poisoned_bytes, "never made"),
        (0, out.offset, "wrote outside of"),
        (0, out.begin + out.span_bytes, "wrote outside of"),
    ):
        touched = back.clone()
        touched[index, at] ^= 1
        problem = sets.problem_with([right], Left(touched, key, digests), [0])
        assert problem is not None
        assert problem[0] == "guards"
        assert found in problem[1]


def test_bytes_that_change_after_the_reply_tell_in_whichever_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (memory_file, mixing):
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    descriptor = memory_file.memory_file("outputs", 1 << 12)
    sent = torch.arange(350).to(torch.uint8)
    memory_file.write_at_start(descriptor, sent)
    told = mixing.checksums(sent.numpy().data)
    assert len(told) == 4
    for at in (None, 0, 99, 100, 349):
        if at is not None:
            os.pwrite(descriptor, bytes([int(sent[at]) ^ 1]), at)
        read = torch.empty(350, dtype=torch.uint8)
        assert (memory_file.read_summed(descriptor, read) == told) is (at is None)
        memory_file.write_at_start(descriptor, sent)
    assert memory_file.read_summed(descriptor, read[:60]) != told
    with pytest.raises(ValueError, match="cut off"):
        memory_file.read_summed(descriptor, torch.empty(1 << 13, dtype=torch.uint8))
    os.close(descriptor)


def test_what_the_judge_compares_with_is_not_what_the_runner_maps(
    small_is_large: None, sent: GpuSets
) -> None:
    pool = RandomPool(OP, OP.sweep("cpu"), "cpu", Secrets(2))
    sets = CallSets.made(OP, [Case(POINT, "normal", 1, ())], "cpu", pool)
    rows = sent.sent(1, sets.plan.sent_bytes)
    sets.write(rows)
    held, values = sets.data.clone(), {k: v.clone() for k, v in sets.inputs[0].items()}
    rows[:] = GARBAGE
    assert torch.equal(sets.data, held)
    assert all(
        torch.equal(v.view(torch.uint8), values[k].view(torch.uint8))
        for k, v in sets.inputs[0].items()
    )


def test_more_than_one_command_may_have_is_refused(
    sent: GpuSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_file, "CAPACITY", 1000)
    assert sent.sent(2, 500).shape == (2, 500)
    with pytest.raises(ValueError, match="1002 bytes for one command, at most 1000 allowed"):
        sent.sent(2, 501)
