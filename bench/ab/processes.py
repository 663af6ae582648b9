"""Processes that each hold one arm's engine: what an A/B needs of them, and how many fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from patcher.bench.ab.windows import Name, PairKind, Side
from patcher.bench.errors import PatcherError, UsageError
from patcher.bench.stats.intervals import DEFAULT_PAIRS, DEFAULT_PROCESS_PAIRS, MIN_PROCESS_PAIRS
from patcher.bench.workload import Shape

SHARE_BESIDE = 0.42
"""Of the device's memory for each of two engines that take theirs in advance."""
SHARE_ALONE = 0.85
SLACK = 1.02
"""What the next process may take, as times what the first one has."""
CONTROL_PAIRS = 8
"""Pairs of the A/A control, the warm-up pair not counted."""
WARM_UP_STEPS = 8


class ProcessMemory(NamedTuple):
    """In bytes, of the device, on a CPU of the host."""

    held: int
    """What the process has taken since it began to load."""
    peak: int
    """The most that its tensors took, on a CPU the whole process."""
    free: int

    @property
    def room(self) -> int:
        """How many such processes fit, this one with them."""
        return 1 + int(self.free / (SLACK * max(self.held, 1)))


class EngineProcess(Protocol):
    """A process with one arm's engine, loaded and idle until it is asked."""

    vocab_size: int

    def side(self, shape: Shape | None = None) -> Side:
        """For windows of that traffic, else of the workload's."""
        ...

    def warm_up(self, seed: int, steps: int) -> None:
        """A window that nobody times."""
        ...

    def in_steps(self, seed: int) -> list[float]:
        """See `patcher.bench.ab.latency.in_steps`."""
        ...

    def memory(self) -> ProcessMemory: ...

    def close(self) -> None:
        """End it with all that it started. Once more is the same as once."""
        ...


Process = TypeVar("Process", bound=EngineProcess)
ProcessOut = TypeVar("ProcessOut", bound=EngineProcess, covariant=True)
Started = TypeVar("Started")


class Launcher(Protocol[ProcessOut]):
    """Starts the processes of an A/B."""

    def start(self, name: str, memory_share: float) -> ProcessOut:
        """Start the process of that name with such a share of the device's memory, and wait until
        it is loaded.
        """
        ...


class TooLateError(PatcherError):
    """A process did not answer in time."""


@dataclass(frozen=True)
class ABPlan:
    """How much is taken."""

    process_pairs: int = DEFAULT_PROCESS_PAIRS
    """Blocks that each variant is in."""
    pairs: int = DEFAULT_PAIRS // DEFAULT_PROCESS_PAIRS
    """Of windows, in each block, without the warm-up pair; with it, an even number."""
    shared: bool = False
    """Whether several variants are in a block, and the control in the first of them; else each
    block has one variant, and the control is a block of its own."""
    together: bool | None = None
    """Whether both arms of a block with one variant are loaded at once; None: where memory
    allows."""
    stagger_s: float | None = None
    """Seconds from one start to the next where a block needs several, which then load side by
    side; None: the second starts when the first is loaded, as an engine needs that finds out by
    itself how much memory it may take."""

    def taken(self, kind: PairKind) -> int:
        """Pairs of a block with its warm-up pair."""
        count = 1 + (min(self.pairs, CONTROL_PAIRS) if kind == "aa" else self.pairs)
        return count + count % 2


def refuse_few(process_pairs: int) -> None:
    """Raises:
    UsageError: too few process pairs for a verdict.
    """
    if process_pairs < MIN_PROCESS_PAIRS:
        raise UsageError(
            f"{process_pairs} process pairs do not show what processes differ by",
            f"take {MIN_PROCESS_PAIRS} at least",
        )


def open_all(
    names: Sequence[Name], start: Callable[[Name], Started], stagger_s: float | None
) -> dict[Name, Started]:
    """Start each of them, in this order; see `ABPlan.stagger_s`. All have ended to load when this
    does, also where one fails.
    """
    if stagger_s is None or len(names) < 2:
        return {name: start(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        loading = {names[0]: pool.submit(start, names[0])}
        for name in names[1:]:
            time.sleep(stagger_s)  # who starts first is the first to take memory
            loading[name] = pool.submit(start, name)
        return {name: one.result() for name, one in loading.items()}
