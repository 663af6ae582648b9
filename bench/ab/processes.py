"""Interfaces of processes that each hold one arm's engine, and how many fit."""

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
"""Share of the device's memory for each of two engines that allocate theirs in advance."""
SHARE_ALONE = 0.85
SLACK = 1.02
"""Largest expected memory of the next process, as a multiple of the first one's."""
CONTROL_PAIRS = 8
"""Pairs of the A/A control, without the warm-up pair."""
WARM_UP_STEPS = 8


class ProcessMemory(NamedTuple):
    """Memory in bytes of the device, or of the host on a CPU."""

    held: int
    """Memory that the process has taken since it began to load."""
    peak: int
    """Peak memory of its tensors; on a CPU, of the whole process."""
    free: int

    @property
    def room(self) -> int:
        """How many such processes fit, including this one."""
        return 1 + int(self.free / (SLACK * max(self.held, 1)))


class EngineProcess(Protocol):
    """A process with one arm's engine, loaded and idle between calls."""

    vocab_size: int

    def side(self, shape: Shape | None = None) -> Side:
        """A side for windows of that traffic, by default the workload's."""
        ...

    def warm_up(self, seed: int, steps: int) -> None:
        """Run a window that is not timed."""
        ...

    def in_steps(self, seed: int) -> list[float]:
        """See `patcher.bench.ab.latency.in_steps`."""
        ...

    def memory(self) -> ProcessMemory: ...

    def close(self) -> None:
        """End the process and its children; idempotent."""
        ...


Process = TypeVar("Process", bound=EngineProcess)
ProcessOut = TypeVar("ProcessOut", bound=EngineProcess, covariant=True)
Started = TypeVar("Started")


class Launcher(Protocol[ProcessOut]):
    """Starts the processes of an A/B."""

    def start(self, name: str, memory_share: float) -> ProcessOut:
        """Start the process of that name with a share of the device's memory, and wait until it is
        loaded.
        """
        ...


class TooLateError(PatcherError):
    """A process did not answer in time."""


@dataclass(frozen=True)
class ABPlan:
    """The number of blocks and pairs to take."""

    process_pairs: int = DEFAULT_PROCESS_PAIRS
    """Number of blocks with each variant."""
    pairs: int = DEFAULT_PAIRS // DEFAULT_PROCESS_PAIRS
    """Pairs of windows in each block without the warm-up pair; with it, the number is even."""
    shared: bool = False
    """Whether a block has several variants, and the first one the control. Otherwise each block has
    one variant, and the control is a separate block."""
    together: bool | None = None
    """Whether both arms of a block with one variant are loaded at once; None: if memory allows."""
    stagger_s: float | None = None
    """Seconds between starts of a block's processes, which then load in parallel. None: each starts
    when the one before is loaded, for engines that size their memory by what is free."""

    def taken(self, kind: PairKind) -> int:
        """Number of pairs of a block with its warm-up pair."""
        count = 1 + (min(self.pairs, CONTROL_PAIRS) if kind == "aa" else self.pairs)
        return count + count % 2


def refuse_few(process_pairs: int) -> None:
    """Check the number of process pairs.

    Raises:
        UsageError: there are too few for a verdict.
    """
    if process_pairs < MIN_PROCESS_PAIRS:
        raise UsageError(
            f"{process_pairs} process pairs cannot show the difference between processes",
            f"take at least {MIN_PROCESS_PAIRS}",
        )


def open_all(
    names: Sequence[Name], start: Callable[[Name], Started], stagger_s: float | None
) -> dict[Name, Started]:
    """Start the processes in this order; see `ABPlan.stagger_s`. It returns, or raises, only after
    all have stopped loading.
    """
    if stagger_s is None or len(names) < 2:
        return {name: start(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        loading = {names[0]: pool.submit(start, names[0])}
        for name in names[1:]:
            time.sleep(stagger_s)  # the first one to start allocates memory first
            loading[name] = pool.submit(start, name)
        return {name: one.result() for name, one in loading.items()}
