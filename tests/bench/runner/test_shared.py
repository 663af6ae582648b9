"""Device memory of two processes: a real file in memory behind a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_cuda import HostCuda

from patcher.bench.judge import gpu_sets
from patcher.bench.judge.blob import Wanted, layout
from patcher.bench.judge.gpu_sets import GpuSets
from patcher.bench.judge.memory_file import memory_file
from patcher.bench.runner import exchange, shared
from patcher.bench.runner.captured import Arena
from patcher.bench.runner.driver import CudaDriver, CudaError
from patcher.bench.runner.exchange import Exchange, opened
from patcher.bench.runner.mixing import Mixer
from patcher.bench.runner.shared import BASES, SharedMemory

MIB = 1 << 20
PLAN = layout([Wanted(name=name, dtype="float32", shape=(100,)) for name in "ab"])


def on_host(address: int, size: int) -> torch.Tensor:
    """What `bytes_at` gives on a GPU, of the double's memory."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


@pytest.fixture
def driver(double: str, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(shared, "bytes_at", on_host)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return CudaDriver(double)


def theirs(driver: CudaDriver, ours: SharedMemory) -> SharedMemory:
    """The memory as the other process opens it, which gets a descriptor of its own."""
    return SharedMemory(driver, ours.size, os.dup(ours.descriptor))


def free(driver: CudaDriver, address: int) -> bool:
    got = driver.reserve(address, 2 * MIB)
    driver.unreserve(got, 2 * MIB)
    return got == address


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_both_see_what_one_writes_and_all_is_given_back(driver: CudaDriver) -> None:
    before = descriptors()
    ours = SharedMemory(driver, 3 * MIB)
    assert ours.size == 4 * MIB  # what the driver maps
    assert ours.pointer == BASES[0]
    other = theirs(driver, ours)
    assert other.pointer == BASES[1]  # here both are in one process
    ours.rows(2, 5)[1] = 7
    assert other.bytes[:12].tolist() == [0] * 5 + [7] * 5 + [0, 0]
    other.bytes[-1] = 9
    assert int(ours.bytes[-1]) == 9
    third = theirs(driver, ours)  # no base is free: the driver chooses
    assert third.pointer not in BASES
    assert int(third.bytes[-1]) == 9
    driver.unback(other.pointer, other.size)
    driver.unreserve(other.pointer, other.size)
    ours.close()
    assert free(driver, BASES[0])
    assert descriptors() == before


def test_what_cannot_be_opened_is_said_and_leaves_nothing(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    status: dict[str, Any] = {}
    before = descriptors()
    assert opened(None, status) is None
    assert status == {}
    broken, end = os.pipe()  # no memory
    os.close(end)
    monkeypatch.setattr(exchange, "CudaDriver", lambda: driver)
    assert opened((broken, MIB), status) is None
    assert "cuMemMap" in status["unshared"]
    assert descriptors() == before
    assert free(driver, BASES[0])


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    made = memory_file("inputs", 8 * MIB), memory_file("outputs", 8 * MIB)
    yield made
    for each in made:
        os.close(each)


@pytest.mark.parametrize("room", [0, 1, MIB], ids=["no memory", "too small", "large enough"])
def test_sets_arrive_and_come_back_whichever_way(
    driver: CudaDriver, files: tuple[int, int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, count = 4096, 3
    monkeypatch.setattr(driver, "granularity", lambda: page)
    assert PLAN.set_bytes * count > page
    memory = SharedMemory(driver, room) if room else None
    monkeypatch.setattr(gpu_sets, "_new_memory", lambda: (memory, ""))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    judge = GpuSets(*files, True)
    assert judge.shared_bytes == (0 if memory is None else memory.size)
    assert len(judge.descriptors) == (memory is not None)
    through_memory = room == MIB
    inputs = mmap.mmap(files[0], 8 * MIB)
    outputs = mmap.mmap(files[1], 8 * MIB)
    at_input, at_output = (
        ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (inputs, outputs)
    )
    mine = None if memory is None else theirs(driver, memory)
    cuda: Any = HostCuda()
    runner = Exchange(cuda, 0, at_input, (outputs, at_output), mine)

    sent = torch.randint(0, 256, (count, PLAN.sent_bytes), dtype=torch.uint8)
    judge.sent(count, PLAN.sent_bytes).copy_(sent)
    assert torch.equal(judge.sent(count, PLAN.sent_bytes), sent)
    assert any(inputs[: sent.numel()]) is not through_memory
    arena = Arena(PLAN.model_dump(), count, device="cpu")
    for here, at, size in arena.pieces(arena.sent, arena.poisoned):
        runner.receive(here, at, size, arena.sent * count)
    assert torch.equal(arena.bytes.view(count, -1), sent)

    arena.bytes[5] ^= 1
    runner.give(arena)
    assert any(outputs[: sent.numel()]) is not through_memory
    found, summed = judge.given(count, PLAN.returned_bytes, key=4)
    assert torch.equal(found, arena.bytes.view(count, -1))
    assert summed == runner.summed(arena, Mixer(), 4)
    if mine is not None:
        mine.bytes[0] ^= 1
    outputs[0] ^= 1
    late, again = judge.given(count, PLAN.returned_bytes, key=4)
    assert again != summed
    assert not torch.equal(late, found)
    assert torch.equal(found, arena.bytes.view(count, -1))  # a copy: out of the runner's reach
    if mine is not None:
        driver.unback(mine.pointer, mine.size)
        driver.unreserve(mine.pointer, mine.size)
    judge.close()
    assert judge.descriptors == []
    judge.close()


def test_without_memory_of_its_own_a_runner_is_given_files(files: tuple[int, int]) -> None:
    judge = GpuSets(*files, shared=torch.cuda.is_available())
    if not torch.cuda.is_available():
        assert judge.shared_bytes == 0
    judge.unshare("not supported")
    assert (judge.shared_bytes, judge.unshared) == (0, "not supported")
    assert judge.descriptors == []
    assert judge.sent(1, 64).device.type == "cpu"


def failing(driver: CudaDriver, patch: pytest.MonkeyPatch, *names: str) -> None:
    call = driver.call

    def refuses(name: str, *arguments: Any) -> None:
        if name in names:
            raise CudaError(f"{name}: not supported (801)")
        call(name, *arguments)

    patch.setattr(driver, "call", refuses)


@pytest.mark.parametrize(
    "name",
    ["Create", "Map", "SetAccess", "ExportToShareableHandle", "ImportFromShareableHandle"],
)
def test_a_driver_that_cannot_share_is_no_error_and_leaves_nothing(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = descriptors()
    ours = SharedMemory(driver, MIB)
    with monkeypatch.context() as patch:
        failing(driver, patch, f"cuMem{name}")
        with pytest.raises(CudaError, match=name):
            _ = theirs(driver, ours) if "Import" in name else SharedMemory(driver, MIB)
    assert free(driver, BASES[1])
    ours.close()
    assert descriptors() == before
    assert free(driver, BASES[0])


def test_closing_after_an_error_is_quiet_and_keeps_no_descriptor(
    driver: CudaDriver, files: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, memory = descriptors(), SharedMemory(driver, MIB)
    monkeypatch.setattr(gpu_sets, "_new_memory", lambda: (memory, ""))
    judge = GpuSets(*files, True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: driver.call("cuMemUnmap", 1, 1))
        failing(driver, patch, "cuMemUnmap", "cuMemAddressFree")
        judge.close()
    assert descriptors() == before
    driver.unback(memory.pointer, memory.size)
    driver.unreserve(memory.pointer, memory.size)


@pytest.mark.parametrize(("device", "failing_wait"), [(0, 0), (1, 0), (0, 1), (0, 2)])
def test_memory_is_shared_on_the_first_device_alone(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, device: int, failing_wait: int
) -> None:
    before, waits = descriptors(), list[int]()

    def synchronize() -> None:
        waits.append(len(waits) + 1)
        if waits[-1] == failing_wait:
            raise RuntimeError("an illegal address")

    whole = SimpleNamespace(total_memory=gpu_sets.SHARE * 2 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: whole)
    monkeypatch.setattr(gpu_sets, "CudaDriver", lambda: driver)
    memory, why = gpu_sets._new_memory()
    assert (memory is None) is bool(device or failing_wait) is bool(why)
    if memory is not None:
        assert (memory.size, waits) == (2 * MIB, [1, 2])
        memory.close()
    assert descriptors() == before
