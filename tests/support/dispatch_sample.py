"""What test_dispatch and others share."""

from __future__ import annotations

from typing import Any

import torch
from patch_sample import add_norm_guards, kernel

from patcher.integrate import CallCounters
from patcher.integrate.counts import GraphWatch
from patcher.integrate.dispatch import Dispatcher
from patcher.integrate.guards import AxisBounds


class Graph:
    """A double of torch.cuda.CUDAGraph: records nothing, has its methods."""

    ended = replayed = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        self.pool = pool

    def capture_end(self) -> None:
        self.ended += 1

    def replay(self) -> None:
        self.replayed += 1


def tensors(tokens: int = 2, hidden: int = 8) -> tuple[torch.Tensor, ...]:
    return torch.ones(tokens, hidden), torch.ones(tokens, hidden), torch.ones(hidden)


def made(watch: GraphWatch | None = None, run: Any = kernel, **more: Any) -> Dispatcher:
    guards = add_norm_guards({"hidden": AxisBounds(multiple_of=8)})
    return Dispatcher("op", run, guards, CallCounters("id", "d1" * 20), watch=watch, **more)
