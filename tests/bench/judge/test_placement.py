"""Where the judge puts tensors: the strides of engines, and that guards allow them."""

from __future__ import annotations

import pytest
import torch

from patcher.bench import DTYPES, Op, Point, load_op, load_ops
from patcher.bench.judge.blob import Slot
from patcher.bench.judge.cases import tensors_of
from patcher.bench.judge.placement import placements
from patcher.integrate.activation import contract_guards

CACHE = ("padded", "interleaved", "packed", "permuted")
PLACED = [(name, placed) for name, op in sorted(load_ops().items()) for placed in placements(op)]


def test_a_strided_tensor_lies_as_engines_lay_it_out() -> None:
    op = load_op("rope_kv_update")
    assert placements(op) == list(CACHE)
    point = op.sweep("cuda", "bf16").points()[0]
    blocks, size, heads, head_dim = 32, 16, 8, 64
    found = {}
    for placed in ("plain", *CACHE):
        slots = {slot.name: slot for slot in tensors_of(op, point, placed).slots}
        assert slots["key_cache"].shape == (blocks, size, heads, head_dim)
        assert slots["key_cache"].strides == slots["value_cache"].strides
        assert slots["positions"].strides == (1,)
        found[placed] = slots["key_cache"].strides
    assert found == {
        "plain": (size * heads * head_dim, heads * head_dim, head_dim, 1),
        # views of keys and values side by side, by block and by head, and heads before tokens
        "interleaved": torch.empty(blocks, 2, size, heads, head_dim)[:, 0].stride(),
        "packed": torch.empty(blocks, size, heads, 2 * head_dim)[..., :head_dim].stride(),
        "permuted": torch.empty(blocks, heads, size, head_dim).transpose(1, 2).stride(),
        "padded": (9352, 584, 72, 1),
    }


def test_rows_have_one_pitch_that_keeps_the_alignment() -> None:
    op = load_op("moe_matmul_swiglu")
    assert placements(op) == ["padded"]
    point = op.sweep("cuda").points()[0]
    [scales] = [slot for slot in tensors_of(op, point, "padded").slots if slot.name == "scales"]
    pitch = 2896  # of 2880 bytes and at least 8 more, rounded up to 16
    assert scales.strides == (scales.shape[1] * pitch, pitch, 1)


@pytest.mark.parametrize(("name", "placed"), PLACED)
def test_no_two_elements_meet_and_the_guards_allow_each_placement(name: str, placed: str) -> None:
    op = load_op(name)
    guards = contract_guards(op.contract, "cpu", []).tensors
    changed = 0
    for point in points(op):
        for guard, slot in zip(guards, tensors_of(op, point, placed).slots, strict=True):
            places = torch.zeros(slot.shape, dtype=torch.long)
            for axis, (size, stride) in enumerate(zip(slot.shape, slot.strides, strict=True)):
                ways = [1] * len(slot.shape)
                ways[axis] = size
                places += (torch.arange(size) * stride).view(ways)
            assert len(set(places.flatten().tolist())) == places.numel()
            tensor = made(slot)
            assert guard.misplaced(tensor) is None
            changed += not tensor.is_contiguous() or placed == "shifted"  # in its address alone
    assert changed


def points(op: Op) -> list[Point]:
    sweep = op.sweep("cpu")
    shapes = [Point(axes=shape.axes, dtypes=sweep.dtypes) for shape in op.contract.hidden]
    return [*sweep.points(), *shapes]


def made(slot: Slot) -> torch.Tensor:
    dtype = DTYPES[slot.dtype].torch_dtype
    return torch.empty_strided(slot.shape, slot.strides, dtype=dtype)
