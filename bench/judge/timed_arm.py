"""One arm of a timed comparison: a runner with its buffers, called block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from patcher.bench.errors import MissingError
from patcher.bench.judge.cases import Case, Secrets
from patcher.bench.judge.clockcheck import CpuUse, TimedBlock
from patcher.bench.judge.process import Left, Runner
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.zygote import RunnerFailure
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op


class WrongCall(Exception):
    """A timed call failed a check.

    Args:
        check: name of the check.
        detail: what the check found.
    """

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail


@dataclass
class TimedArm:
    """One arm of the comparison."""

    op: Op
    """The op."""
    device: str
    """`cpu` or `cuda`."""
    runner: Runner
    """The process that runs this arm."""
    stock: RandomPool
    """Random bits that large tensors are mixed from."""
    checked: bool
    """Whether its outputs are checked, which those of the candidate are."""
    accused: bool = True
    """Whether a failure counts against the candidate; otherwise it is a fault of this machine."""

    def prepare(self, sets: CallSets, timeout_s: float) -> None:
        """Make the first calls at a shape, which run just-in-time compilers; on CUDA, capture them.

        Args:
            sets: the buffers to call with.
            timeout_s: time limit in seconds of each command.
        """
        with self._answering():
            self.stock.lend(self.runner)
            self.runner.send(sets.data)
            self.runner.command("call", timeout_s, **sets.told(), order=[0, 1])
            if self.device == "cuda":
                self.runner.command("capture", timeout_s, **sets.told())

    def block(
        self, sets: CallSets, order: list[int], mode: str = "whole"
    ) -> tuple[TimedBlock, Left | None]:
        """Time one block.

        Args:
            sets: the buffers to call with.
            order: indices of the sets in the order of the calls.
            mode: `whole`, `cold` or `eager`; on a CPU every block is eager.

        Returns:
            The times, and the buffers afterwards if the arm is checked.
        """
        with self._answering():
            return self._block(sets, order, mode)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn a failure of the baseline into a `MissingError`: it is not the candidate's."""
        try:
            yield
        except RunnerFailure as failure:
            if self.accused:
                raise
            raise MissingError(
                f"the baseline fails here while it is timed: {failure.message}",
                "choose another one with --baseline, or see `patcher doctor`",
            ) from failure

    def _block(self, sets: CallSets, order: list[int], mode: str) -> tuple[TimedBlock, Left | None]:
        self.runner.send(sets.data)
        eager = self.device == "cpu" or mode == "eager"
        used = None
        if eager:
            self.runner.command("ready", **sets.told(), order=order)
            reply, used = self._gone()
        else:
            composed = self.runner.command("compose", mode=mode, order=order, recipes=sets.recipes)
            if self.checked and (persisting := composed["persisting_bytes"]):
                raise WrongCall(
                    "guards", f"set {persisting} bytes of L2 aside, which is the engine's to do"
                )
            reply = self.runner.command("launch")
        wall = self.runner.reply_s
        times = [float(value) / 1e3 for value in reply["times_ns"]]
        for value in times:
            if not 0 < value < math.inf:
                raise RunnerFailure(f"an impossible time: {value} us", kind="Protocol")
        block = TimedBlock(times, len(order), wall * 1e6, used)
        if not self.checked:
            return block, None
        left = self.runner.left("hand" if eager else "collect", sets.plan, len(sets.cases))
        if not eager and int(left.blocks.view(np.int64).sum()) != reply["fingerprint"]:
            raise WrongCall(
                "timed outputs", "the outputs were written after the call was said to end"
            )
        return block, left

    def _gone(self) -> tuple[dict[str, Any], CpuUse | None]:
        """Make the prepared calls; and the CPU time that they took, if the arm is checked and
        pinned.

        Raises:
            WrongCall: a thread may run on another CPU than those the arm is pinned to.
        """
        if not self.checked or self.runner.cpus is None:
            return self.runner.command("go"), None
        clock = self.runner.cpu_clock()
        reply = self.runner.command("go")
        used_s, span_s = clock.stop()
        if strayed := self.runner.strayed_cpus():
            raise WrongCall(
                "guards",
                f"let a thread run on CPU {', '.join(map(str, strayed))}; both sides are pinned to "
                f"{', '.join(map(str, self.runner.cpus))}",
            )
        return reply, CpuUse(used_s, span_s)


def fresh_sets(
    op: Op, point: Point, sets: int, device: str, stock: RandomPool, draw: Secrets
) -> CallSets:
    """Draw new inputs of one shape and pack them into buffer sets."""
    return CallSets.made(op, fresh(op, point, sets, draw), device, stock)


def fresh(op: Op, point: Point, sets: int, draw: Secrets) -> list[Case]:
    """Draw cases with new seeds, so that no timed call sees values of an earlier call.

    Some cases differ from another one in only one element per tensor, but never the first two.
    """
    scalars = tuple(scalar.value for scalar in op.contract.scalars)
    cases = [Case(point, "normal", draw.seed(), scalars) for _ in range(sets)]
    for index in range(2, sets):
        if draw.random.random() < 0.25:
            twin = cases[draw.random.randrange(index)]
            cases[index] = Case(point, "normal", twin.seed, scalars, changed=draw.seed())
    return cases
