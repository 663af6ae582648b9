"""What a call works on while a shape is proven, and the device that it is launched on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dispatch_sample import tensors
from feature_matrix import ANY, feature
from patch_sample import add_norm_guards

from patcher.integrate import CallCounters
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import CallGuards, TensorGuard


@feature("KV offload and connectors while a shape is proven", "right", ANY)
@torch.inference_mode()
def test_a_tensor_in_part_keeps_what_arrives_while_a_shape_is_proven() -> None:
    """A KV cache: another stream may write other blocks while the first call of a shape runs."""
    cache, rows = torch.zeros(4, 8), torch.zeros(2, 8)

    def writes_the_first(x: torch.Tensor, part: torch.Tensor) -> None:
        cache[3] = 7.0  # arrives from elsewhere
        x.add_(1)
        part[0] = 1.0

    def fails(x: torch.Tensor, part: torch.Tensor) -> None:
        x.add_(1)
        raise RuntimeError("no")

    guards = CallGuards(
        device="cpu",
        tensors=(
            TensorGuard("x", ("rows", "width"), "T", mutated=True),
            TensorGuard("part", ("blocks", "width"), "T", mutated=True, in_part=True),
        ),
        scalars=(),
        dtypes=({"T": torch.float32},),
    )
    first = Dispatcher("op", writes_the_first, guards, CallCounters("id", "d"), strict=False)
    assert first(rows, cache)
    assert cache[:, 0].tolist() == [1.0, 0.0, 0.0, 7.0]
    assert rows.tolist() == torch.ones(2, 8).tolist()
    assert not Dispatcher("op", fails, guards, CallCounters("id", "d"), strict=False)(rows, cache)
    assert rows.tolist() == torch.ones(2, 8).tolist()  # the failed call worked on a copy


@torch.inference_mode()
def test_a_shape_is_proven_with_the_strides_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def adds(x: torch.Tensor) -> None:
        seen.append(x.stride())
        x.add_(1)

    rows = TensorGuard("x", ("rows", "width"), "T", mutated=True, layout="rows")
    guards = CallGuards("cpu", (rows,), (), ({"T": torch.float32},))
    wide = torch.zeros(3, 24)
    for call in (wide[:, :8], wide[:, 8:16]):
        serves = Dispatcher("op", adds, guards, CallCounters("id", "d"), strict=False)
        assert serves(call)
        assert serves(call)
    assert seen == [(24, 1)] * 4
    assert wide.sum(0).tolist() == [6.0] * 16 + [0.0] * 8
    monkeypatch.setattr("patcher.integrate.dispatch._MOST_COPIED", 100)
    assert Dispatcher("op", adds, guards, CallCounters("id", "d"), strict=False)(wide[:, :8])
    assert seen[-1] == (8, 1), "rows so far apart are copied without what lies between"


class OnAnother(torch.Tensor):
    """A tensor of the host that says that it is on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


@feature("another current device", "right", ANY)
@pytest.mark.parametrize("strict", [True, False])
@torch.inference_mode()
def test_a_call_is_launched_on_the_device_of_its_tensors(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, seen = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    guards = dataclasses.replace(add_norm_guards(), device="cuda")
    run = Dispatcher(
        "op", lambda *args: seen.append(current[0]), guards, CallCounters("id", "d"), strict=strict
    )
    there = [tensor.as_subclass(OnAnother) for tensor in tensors()]
    assert [run(*there, 1e-5) for _ in range(2)] == [True, True]
    assert (seen, current) == ([1, 1], [0])
    current[0] = 1
    assert run(*there, 1e-5)
    assert (seen, current) == ([1, 1, 1], [1])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@torch.inference_mode()
def test_a_kernel_runs_on_the_second_gpu_while_the_first_is_current() -> None:
    guards = dataclasses.replace(add_norm_guards(), device="cuda")
    seen: list[int] = []

    def adds(input: torch.Tensor, residual: torch.Tensor, *rest: Any) -> None:
        seen.append(torch.cuda.current_device())
        residual.add_(input)

    run = Dispatcher("op", adds, guards, CallCounters("id", "d"), strict=False)
    there = [tensor.to("cuda:1") for tensor in tensors()]
    with torch.cuda.device(0):
        assert run(*there, 1e-5)
        assert run(*there, 1e-5)
        assert torch.cuda.current_device() == 0
    assert seen == [1, 1]
