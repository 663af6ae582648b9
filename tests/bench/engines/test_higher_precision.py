"""Modules that are upcast while they run are as before afterwards, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patcher.bench.engines.higher_precision import upcast_in_turn


class Block(torch.nn.Module):
    """A block with a buffer that it writes to; one that fails does so in the middle."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.fails = fails

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen: torch.Tensor
        assert {self.inner.weight.dtype, self.seen.dtype} == {torch.float64}
        self.seen += 1
        if self.fails:
            raise RuntimeError("in the middle of a forward")
        found: torch.Tensor = self.inner(hidden)
        return found


def state(blocks: list[Block]) -> list[tuple[torch.dtype, int]]:
    tensors = [each for block in blocks for each in (*block.parameters(), *block.buffers())]
    return [(each.dtype, each.data_ptr()) for each in tensors if each.requires_grad] + [
        (each.dtype, 0) for each in tensors
    ]


def test_blocks_are_wide_while_they_run_alone() -> None:
    blocks = [Block(), Block()]
    before, weight = state(blocks), blocks[0].inner.weight.clone()
    with upcast_in_turn(list(blocks), torch.float64):
        hidden = blocks[0](torch.ones(1, 4, dtype=torch.float64))
        assert state(blocks) == before, "only the one that runs"
        assert blocks[1](hidden).dtype is torch.float64
    assert state(blocks) == before
    assert blocks[0].inner.weight.equal(weight)
    assert [block.seen.tolist() for block in blocks] == [[1.0] * 4] * 2
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_a_forward_that_raises_leaves_no_wide_block() -> None:
    blocks = [Block(), Block(fails=True)]
    before = state(blocks)
    hidden = torch.ones(1, 4, dtype=torch.float64)
    with upcast_in_turn(list(blocks), torch.float64):
        with pytest.raises(RuntimeError, match="in the middle"):
            blocks[1](blocks[0](hidden))
        assert state(blocks) == before
        blocks[1].fails = False
        assert blocks[1](hidden).dtype is torch.float64


def test_a_hook_of_others_that_raises_leaves_no_wide_block() -> None:
    def stop(*_: Any) -> None:
        raise RuntimeError("before the forward")

    block = Block()
    before = state([block])
    with upcast_in_turn([block], torch.float64):
        block.register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="before the"):
            block(torch.ones(1, 4))
    assert state([block]) == before
