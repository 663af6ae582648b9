"""End-to-end A/B with a process for each arm: for engines that are patched when they start, and
for what two processes differ by.

Two processes of one program differ by about 0.1 % for as long as they live, which no number of
pairs averages out. So pairs are taken in several process pairs, each of two fresh processes, and
the arms swap who starts first (and so has the first half of the memory). The control is a process
pair of its own with the baseline in both, taken first: an A/A within one process would not show
what two differ by. Its first process goes on as the baseline of the first A/B process pair.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from patcher.bench.ab.records import Throughput
from patcher.bench.ab.throughput import check_window, decide_on, of_processes, so_far, unusable
from patcher.bench.ab.windows import Kind, Name, Pair, Side, abba_orders, prompt_seed, take_pair
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.comparison import Arm, Comparison, Window
from patcher.bench.stats.intervals import (
    DEFAULT_PAIRS,
    DEFAULT_PROCESS_PAIRS,
    MIN_PROCESS_PAIRS,
    Look,
    first_decided,
    look_confidences,
)
from patcher.bench.workload import Shape, Workload

SHARE_BESIDE = 0.42
"""Of the device's memory for each of two engines that take theirs in advance."""
SHARE_ALONE = 0.85
SLACK = 1.02
"""What the next process may take, as times what the first one has."""
CONTROL_PAIRS = 8
"""Pairs of the A/A process pair, the warm-up pair not counted."""
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


class TooLateError(PatcherError):
    """A process did not answer in time."""


Process = TypeVar("Process", bound=EngineProcess)
Opened = TypeVar("Opened")
Start = Callable[[Arm, float], Process]
"""Starts an arm's process with that share of the device's memory and waits until it is loaded."""
Visit = Callable[[Pair, Arm, Process], None]
"""Called with each process and the last of its pairs, right after it: what else is asked of it."""
Also = Callable[[Pair, Mapping[Arm, Process]], None]
"""Called with the processes of an A/B process pair that are loaded, after its last pair and the
visits: what else is measured between them. One by one where only one is loaded at a time."""


@dataclass(frozen=True)
class ABPlan:
    """How much is taken."""

    process_pairs: int = DEFAULT_PROCESS_PAIRS
    """A/B process pairs until a look."""
    pairs: int = DEFAULT_PAIRS // DEFAULT_PROCESS_PAIRS
    """Of windows, in each process pair, without the warm-up pair; in whole ABBA blocks."""
    looks: int = 1
    together: bool | None = None
    """Whether both arms are loaded at once; None: where memory allows."""
    stagger_s: float | None = None
    """Seconds from one start to the next where a process pair needs two, which then load side by
    side; None: the second starts when the first is loaded, as an engine needs that finds out by
    itself how much memory it may take."""

    def taken(self, kind: Kind) -> int:
        """Pairs of a process pair with its warm-up pair."""
        count = 1 + (min(self.pairs, CONTROL_PAIRS) if kind == "aa" else self.pairs)
        return count + count % 2


def open_all(
    names: Sequence[Name], start: Callable[[Name], Opened], stagger_s: float | None
) -> dict[Name, Opened]:
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


def measure_processes(
    start: Start[Process],
    workload: Workload,
    plan: ABPlan,
    *,
    margin_pct: float,
    patch_id: str | None,
    clocks: ClockMonitor,
    seed: int = 0,
    visit: Visit[Process] | None = None,
    also: Also[Process] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Throughput:
    """Measure until a look decides or all process pairs are taken; no process outlives this.

    Raises:
        UsageError: a window too short to time, or too few process pairs.
        PatcherError: a process died, an engine gave other tokens than asked for, or every pair was
            unfit.
    """
    check_window(workload)
    refuse_few(plan.process_pairs)
    total = plan.taken("aa") + plan.looks * plan.process_pairs * plan.taken("ab")
    with ExitStack() as stack:
        sitting = Sitting(start, workload, plan, margin_pct, clocks, seed, total, stack)
        if visit is not None:
            sitting.visit = visit
        if also is not None:
            sitting.also = also
        if progress is not None:
            sitting.progress = progress
        sitting.process_pair("aa", swapped=False)

        def at(look: Look) -> Comparison | None:
            while sitting.taken < look.taken:
                sitting.process_pair("ab", swapped=sitting.taken % 2 == 1)
                sitting.taken += 1
            return decide_on(sitting.windows, "ab", margin_pct, look.confidence_pct)

        levels = look_confidences(plan.looks)
        looks = [Look(plan.process_pairs * n, level) for n, level in enumerate(levels, 1)]
        comparison = first_decided(looks, at)
    if comparison is None:
        raise unusable(len({window.pair for window in sitting.windows}), clocks)
    return of_processes(
        workload,
        patch_id,
        comparison,
        sitting.windows,
        sitting.steps,
        sitting.peak,
        sitting.residency,
        margin_pct,
        clocks,
    )


def refuse_few(process_pairs: int) -> None:
    """Raises:
    UsageError: too few process pairs for a verdict.
    """
    if process_pairs < MIN_PROCESS_PAIRS:
        raise UsageError(
            f"{process_pairs} process pairs do not show what processes differ by",
            f"take {MIN_PROCESS_PAIRS} at least",
        )


@dataclass
class Sitting(Generic[Process]):
    """What has been taken, and the process that is kept for the next process pair."""

    start: Start[Process]
    workload: Workload
    plan: ABPlan
    margin_pct: float
    clocks: ClockMonitor
    seed: int
    total: int
    stack: ExitStack
    visit: Visit[Process] = lambda pair, arm, process: None
    also: Also[Process] = lambda pair, processes: None
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    taken: int = 0
    """A/B process pairs."""
    windows: list[Window] = field(default_factory=list)
    steps: dict[Arm, list[float]] = field(default_factory=dict)
    peak: dict[Arm, list[int]] = field(default_factory=dict)
    residency: str = ""
    together: bool | None = None
    _kept: Process | None = None
    _pairs: int = 0
    _processes: int = 0

    def process_pair(self, kind: Kind, swapped: bool) -> None:
        """Two processes, their pairs, and their end."""
        if not self.residency:
            self._find_room()
        rng = random.Random(f"{self.seed}:{self._processes}")
        orders = abba_orders(rng, self.plan.taken(kind))
        pairs = [
            Pair(number, kind, order, self._processes, swapped)
            for number, order in enumerate(orders, self._pairs)
        ]
        begun: tuple[Arm, Arm] = ("patched", "baseline") if swapped else ("baseline", "patched")
        (self._beside if self.together else self._in_turn)(kind, begun, pairs)
        self._pairs += len(pairs)
        self._processes += 1

    def _beside(self, kind: Kind, begun: tuple[Arm, Arm], pairs: list[Pair]) -> None:
        arms = self._open_both(kind, begun)
        sides: dict[Arm, Side] = {arm: process.side() for arm, process in arms.items()}
        self._tell()
        for pair in pairs:
            vocab = arms["baseline"].vocab_size
            self.windows += take_pair(pair, sides, self.workload, vocab, self.seed, self.clocks)
            self._tell()
        self._look_at(pairs[-1], arms)
        for arm, process in arms.items():
            if kind == "aa" and arm == "baseline":
                self._kept = process
            else:
                process.close()

    def _in_turn(self, kind: Kind, begun: tuple[Arm, Arm], pairs: list[Pair]) -> None:
        found: dict[tuple[int, Arm], Window] = {}
        for arm in begun:
            process = self._open(kind, arm, SHARE_ALONE)
            side = process.side()
            self._tell()
            for pair in pairs:
                [found[pair.number, arm]] = take_pair(
                    pair, {arm: side}, self.workload, process.vocab_size, self.seed, self.clocks
                )
            self._look_at(pairs[-1], {arm: process})
            process.close()
        self.windows += [found[pair.number, arm] for pair in pairs for arm in pair.order]
        self._tell()

    def _open_both(self, kind: Kind, begun: tuple[Arm, Arm]) -> dict[Arm, Process]:
        stagger_s = None if self._kept is not None else self.plan.stagger_s
        return open_all(begun, lambda arm: self._open(kind, arm, SHARE_BESIDE), stagger_s)

    def _open(self, kind: Kind, arm: Arm, share: float) -> Process:
        """A process for this arm, warm."""
        kept, self._kept = self._kept, None
        if kept is not None:
            if arm == "baseline":
                return kept
            kept.close()
        what = "a second baseline" if kind == "aa" and arm == "patched" else f"the {arm}"
        self._tell(f"process pair {self._processes + 1}: loading {what}")
        process = self._started("baseline" if kind == "aa" else arm, share)
        process.warm_up(prompt_seed(self.seed, -1), min(self.workload.output_len, WARM_UP_STEPS))
        return process

    def _started(self, arm: Arm, share: float) -> Process:
        process = self.start(arm, share)
        self.stack.callback(process.close)
        return process

    def _find_room(self) -> None:
        """Whether two engines fit, by what the first one takes, which is kept if they do."""
        self.together, why = self.plan.together, "as asked"
        if self.together is None:
            self.together, why = self._try_room()
        self.residency = (
            "both arms loaded at once, one idle while the other has its turn"
            if self.together
            else f"one arm loaded at a time: {why}"
        )

    def _try_room(self) -> tuple[bool, str]:
        self._tell("loading the first, to see whether two fit")
        try:
            first = self._started("baseline", SHARE_BESIDE)
        except (MissingError, UsageError):
            raise  # that is no matter of memory
        except PatcherError as error:
            return False, f"in half of the memory it does not start: {error.message[:200]}"
        memory = first.memory()
        if memory.room < 2:
            first.close()
            return False, f"one takes {_gib(memory.held)}, {_gib(memory.free)} are left"
        first.warm_up(prompt_seed(self.seed, -1), WARM_UP_STEPS)
        self._kept = first
        return True, ""

    def _look_at(self, last: Pair, processes: Mapping[Arm, Process]) -> None:
        """Memory and latency, after the pairs, and what else is asked, which counts calls and so
        comes before any that no window is of.
        """
        self._tell(f"asking {' and '.join(processes)}")
        for arm, process in processes.items():
            if last.kind == "ab":
                self.peak.setdefault(arm, []).append(process.memory().peak)
            self.visit(last, arm, process)
            if last.kind == "ab":
                own = self.steps.setdefault(arm, [])
                own += process.in_steps(prompt_seed(self.seed + 1, last.number))
        if last.kind == "ab":
            self.also(last, processes)

    def _tell(self, note: str = "") -> None:
        done = len({(window.pair, window.kind) for window in self.windows})
        note = f" ({note})" if note else so_far(self.windows, self.margin_pct)
        self.progress(f"pairs in processes{note}", done, self.total)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
