"""One arm of a timed comparison: a runner with its buffers, called block by block."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from patcher.bench.errors import MissingError
from patcher.bench.judge.cases import Case, Secrets
from patcher.bench.judge.clockcheck import Span, TimedBlock
from patcher.bench.judge.device_code import DeviceCode
from patcher.bench.judge.memory_file import Left
from patcher.bench.judge.process import Runner, Spent
from patcher.bench.judge.random_pool import RandomPool
from patcher.bench.judge.sets import CallSets
from patcher.bench.judge.zygote import ForgedReplyError, RunnerFailure, text_of
from patcher.bench.ops.contract import Point
from patcher.bench.ops.op import Op
from patcher.bench.sandbox import process_tree as tree


class WrongCall(Exception):
    """A timed call failed a check.

    Args:
        check: name of the check.
        detail: what the check found.
    """

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail


METHODS = {
    "cpu": "CPU time of all threads from the judge's command to the reply, less that of an empty "
    "command, mean of a block; ABBA pairs; a process runs only while it is timed",
    "cuda": "calls captured one by one, composed in secret order, one graph replay between events; "
    "interleaved ABBA pairs; L2 warm from the copy-in of sets that fit (cold figures beside it)",
}
"""How calls are timed, in words, by device."""
IDLE_US = 50.0
"""Idle time in microseconds beyond that of the empty commands that costs nothing."""


def timing_method(device: str, *runners: Runner) -> str:
    """How calls are timed, and why sets of calls go through files, if they do."""
    why = next((one.gpu_sets.unshared for one in runners if one.gpu_sets.unshared), "")
    return METHODS[device] + (f"; sets through files in memory: {why[:200]}" if why else "")


class EmptyCommands:
    """The last empty commands of the trusted runner, whose cost is taken off both arms' blocks."""

    def __init__(self) -> None:
        self._last: deque[Spent] = deque(maxlen=9)

    def add(self, spent: Spent) -> None:
        """Remember one more."""
        self._last.append(spent)

    def net_us(self, spent: Spent, cpus: int) -> float:
        """The time that a block's calls took, in microseconds.

        On one CPU it is the CPU time of all threads, which other programs on the machine hardly
        change, and time in which nobody worked. On several it is the judge's clock, and no less
        than the CPU time by their number.
        """
        cpu = spent.cpu_us - statistics.median(each.cpu_us for each in self._last)
        if cpus == 1:
            usual = max(each.idle_us for each in self._last) + IDLE_US
            return cpu + max(spent.idle_us - usual, 0.0)
        return max(
            cpu / cpus, spent.wall_us - statistics.median(each.wall_us for each in self._last)
        )

    def spread_us(self, cpus: int) -> float:
        """By how much their cost differs, in microseconds, as `net_us` takes it off."""
        costs = [each.cpu_us if cpus == 1 else each.wall_us for each in self._last]
        return max(costs) - min(costs)


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
    """What large tensors are mixed from."""
    checked: bool
    """Whether its outputs are checked, which those of the candidate are."""
    accused: bool = True
    """Whether a failure counts against the candidate; otherwise it is a fault of this machine."""
    empty: EmptyCommands = field(default_factory=EmptyCommands)
    """On a CPU: both arms of a comparison share it, and the one that is not checked adds to it."""
    apart: DeviceCode | None = None
    """On CUDA: where captured calls run instead, if they can be carried there."""

    idle: Callable[[Runner], str | None] | None = None
    """On CUDA: asked before each block, what the candidate did that keeps the GPU busy."""

    @property
    def graphs(self) -> Runner:
        """On CUDA: the process that runs captured calls."""
        carried = self.apart is not None and self.apart.carried
        return self.apart.runner if carried and self.apart is not None else self.runner

    @property
    def empty_spread_us(self) -> float:
        """On a CPU: by how much the empty commands differ, in microseconds."""
        return self.empty.spread_us(len(self.runner.cpus or []))

    def prepare(self, sets: CallSets, timeout_s: float) -> None:
        """Make the first calls at a shape, which run just-in-time compilers; on CUDA, capture them.

        Args:
            sets: the buffers to call with.
            timeout_s: time limit in seconds of each command.
        """
        with self._answering():
            if self.device == "cpu":
                make_ready(self.runner, sets, [0, 1])
                self.runner.clocked("go", timeout_s)
                return
            self.stock.lend(self.runner)
            sets.send(self.runner)
            self.runner.command("call", timeout_s, **sets.told(), order=[0, 1])
            sets.send(self.runner)  # the calls gave over it
            self._refuse_persisting(self.runner.command("capture", timeout_s, **sets.told()))

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
            if self.device == "cpu":
                return self._cpu_block(sets, order)
            return self._gpu_block(sets, order, mode)

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

    def ready(self, sets: CallSets, order: list[int]) -> None:
        """On a CPU: prepare the calls of the sets of `order`."""
        with self._answering():
            self.runner.command("ready", **sets.told(), order=order)

    def _cpu_block(self, sets: CallSets, order: list[int]) -> tuple[TimedBlock, Left | None]:
        """Time one block by the judge's clocks, which are all that counts."""
        self.ready(sets, order)
        # values come after the empty commands, the first of which warms the caches of both arms
        self.runner.clocked("go", empty=True)
        if not self.checked:
            self.empty.add(self.runner.clocked("go", empty=True)[1])
        sets.fill(self.runner)
        block = self._gone(len(order))
        return block, self.runner.sets.left(sets.plan, len(sets.cases)) if self.checked else None

    def call_alone(self, sets: CallSets, index: int) -> TimedBlock:
        """On a CPU: call a set in a command of its own, which is the first to see its values.

        The sets must be ready.
        """
        with self._answering():
            _, spent = self.runner.clocked("go", empty=True)
            if not self.checked:
                self.empty.add(spent)
            here = slice(index, index + 1)
            sets.fill(self.runner, here)
            return self._gone(1, only=index)

    def _gone(self, calls: int, **which: int) -> TimedBlock:
        """Let the stopped runner make its calls.

        Raises:
            WrongCall: a thread may run on another CPU than those the arm is pinned to, or a process
                ended, so that its CPU time is not known.
        """
        cpus = self.runner.cpus or []
        meets = not self.checked and len(cpus) > 1  # threads that wait for each other
        before = tree.thread_times(self.runner.stop()) if meets else {}
        _, spent = self.runner.clocked("go", **which)
        now = tree.thread_times(self.runner.stop()) if meets else {}
        waited_us = 1e6 * tree.held_up_s(before, now)
        if self.checked and (strayed := self.runner.strayed_cpus()):
            raise WrongCall(
                "guards",
                f"let a thread run on CPU {', '.join(map(str, strayed))}; both sides are pinned to "
                f"{', '.join(map(str, cpus))}",
            )
        if self.checked and spent.lost:
            raise WrongCall("guards", "a process ended in a timed call: its CPU time is lost")
        # noise may leave nothing of a very short call
        call_us = max(self.empty.net_us(spent, len(cpus)) / calls, 1e-3)
        return TimedBlock([call_us], calls, spent.wall_us, waited_us)

    def _gpu_block(
        self, sets: CallSets, order: list[int], mode: str
    ) -> tuple[TimedBlock, Left | None]:
        runner = self.runner if mode == "eager" else self.graphs
        if runner is not self.runner:
            self.runner.stop()  # until its next command
        if self.idle is not None and (found := self.idle(runner)):
            raise WrongCall("guards", found)
        sets.send(runner)
        if mode == "eager":
            runner.command("ready", **sets.told(), order=order)
            reply = runner.command("go")
        else:
            composed = runner.command("compose", mode=mode, order=order, recipes=sets.recipes)
            self._refuse_persisting(composed)
            reply = runner.command("launch")
        wall = runner.reply_s
        times = _times_us(reply, {"whole": 1, "verified": 0}.get(mode, len(order)))
        block = TimedBlock(times, len(order), wall * 1e6)
        if not self.checked:
            return block, None
        do = "hand" if mode == "eager" else "collect"
        left = runner.left(do, sets.plan, len(sets.cases))
        if mode != "eager" and int(left.blocks.view(torch.int64).sum()) != reply.get("fingerprint"):
            raise WrongCall(
                "timed outputs", "the outputs were written after the call was said to end"
            )
        return block, left

    def spans(self, sets: CallSets, order: list[int], timeout_s: float) -> tuple[list[Span], float]:
        """On CUDA: CUPTI's spans of captured calls, and the events' nanoseconds."""
        sets.send(self.graphs)
        reply = self.graphs.command("spans", timeout_s, order=order, recipes=sets.recipes)
        return _spans(reply), 1e3 * _times_us(reply, 1)[0] * len(order)

    def _refuse_persisting(self, reply: dict[str, Any]) -> None:
        persisting = reply.get("persisting_bytes")
        if self.checked and persisting != 0:
            said = text_of(persisting)[:40]
            raise WrongCall("guards", f"set {said} bytes of L2 aside, which is the engine's to do")


def _times_us(reply: dict[str, Any], count: int) -> list[float]:
    """So many times in microseconds, of a reply that may say anything."""
    try:
        times = [float(value) / 1e3 for value in reply["times_ns"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        times = []
    if len(times) != count:
        raise ForgedReplyError("its reply has other times than those of the calls")
    for value in times:
        if not 0 < value < math.inf:
            raise RunnerFailure(f"an impossible time: {value} us", kind="Protocol")
    return times


def _spans(reply: dict[str, Any]) -> list[Span]:
    """CUPTI's spans, of a reply that may say anything."""
    try:
        spans = [(text_of(name), int(begin), int(end)) for name, begin, end in reply["spans"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        spans = [("", 0, 0)]
    if not all(0 <= begin < end < 1 << 63 for _, begin, end in spans):
        raise ForgedReplyError("its reply has no spans")
    return spans


def make_ready(runner: Runner, sets: CallSets, order: list[int]) -> None:
    """On a CPU: prepare calls of the sets of `order`, stop the runner, and fill its buffers."""
    runner.command("ready", **sets.told(), order=order)
    runner.stop()
    sets.fill(runner)


def fresh_sets(
    op: Op, point: Point, sets: int, device: str, stock: RandomPool, draw: Secrets
) -> CallSets:
    """Draw new inputs of one shape and pack them into buffer sets."""
    return CallSets.made(op, fresh(op, point, sets, draw), device, stock)


def fresh(op: Op, point: Point, sets: int, draw: Secrets) -> list[Case]:
    """Draw cases with new seeds, so that no timed call sees values of an earlier call.

    Some cases differ from another one in only one element per tensor, but never the first two.
    """
    scalars = op.served_scalars
    cases = [Case(point, "normal", draw.seed(), scalars) for _ in range(sets)]
    for index in range(2, sets):
        if draw.random.random() < 0.25:
            twin = cases[draw.random.randrange(index)]
            cases[index] = Case(point, "normal", twin.seed, scalars, changed=draw.seed())
    return cases
