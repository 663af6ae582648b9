"""Take an A/B in blocks: which blocks are missing, their variants, and their results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self

from patcher.bench.ab.blocks import (
    BASELINE,
    CONTROL,
    Block,
    BlockRound,
    round_orders,
    take_round,
)
from patcher.bench.ab.phases import ABPhase, ABProgress, silent
from patcher.bench.ab.process_pool import ProcessPool
from patcher.bench.ab.processes import ABPlan, Launcher, Process
from patcher.bench.ab.throughput import check_window, so_far
from patcher.bench.ab.windows import prompt_seed
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.stats.comparison import Arm, Window
from patcher.bench.workload import Workload

MIN_ROOM = 3
"""Fewest processes side by side with which variants can share a baseline."""


@dataclass
class BlockSession(Generic[Process]):
    """Takes the missing blocks; on exit all its processes are ended.

    The caller makes further measurements between the steps of a block:

        with BlockSession(...) as session:
            for block in session.blocks_left():
                for processes in block.loaded():
                    block.take(processes)
                    for name, process in processes.items():
                        block.read_peak(name, process)
                        block.time_steps(name, process)
                block.close()
    """

    launcher: Launcher[Process]
    variants: tuple[str, ...]
    """Names of their processes."""
    workload: Workload
    plan: ABPlan
    clocks: ClockMonitor
    taken: list[Block] = field(default_factory=list)
    """The finished blocks, with those of an earlier session."""
    seed: int = 0
    progress: ABProgress = silent
    under_way: OpenBlock[Process] | None = None
    pool: ProcessPool[Process] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = ProcessPool(
            self.launcher, self.workload, self.seed, self.plan.stagger_s, self.tell_block
        )

    def __enter__(self) -> Self:
        """Check the workload.

        Raises:
            UsageError: a window is too short to time.
        """
        check_window(self.workload)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.end()

    def blocks_left(self) -> Iterator[OpenBlock[Process]]:
        """Yield each missing block, which must be taken and closed before the next one. Yields none
        if fewer processes fit than a shared block needs (`MIN_ROOM`).

        Raises:
            PatcherError: a process does not load.
        """
        while chosen := self._lacking():
            room = self.pool.find_room(self.plan.together)
            control = not self.taken
            if self.plan.shared:
                if room.processes < MIN_ROOM:
                    self.pool.end()
                    return
                chosen = chosen[: room.processes - 1 - control]
            elif control:
                chosen = []
            fresh = self.pool.baseline is None
            swapped = {name: fresh and self._turn(name) for name in chosen}
            self.under_way = OpenBlock(self, swapped, control)
            yield self.under_way

    @property
    def complete(self) -> bool:
        """Whether no block is missing."""
        return not self._lacking()

    def residency(self, name: str) -> str:
        """How the processes of that variant's blocks shared the device, in words."""
        if self.plan.shared:
            loaded = max(block.loaded for block in self.taken if name in block.swapped)
            return (
                f"a quick look: {loaded} processes loaded at once, idle but for the one that has "
                "its turn; one baseline for all that were measured beside it"
            )
        if self.pool.together:
            return "a quick look: both arms loaded at once, one idle while the other has its turn"
        return f"one arm loaded at a time: {self.pool.room.why if self.pool.room else ''}"

    def tell(self, phase: ABPhase, note: str) -> None:
        """Report the number of pairs taken and of all pairs; `note` has its own brackets."""
        plan = self.plan
        total = plan.taken("ab") * plan.process_pairs * len(self.variants)
        total += 0 if plan.shared else plan.taken("aa")
        done = sum(
            plan.taken("ab") * len(block.swapped) if block.swapped else plan.taken("aa")
            for block in self.taken
        )
        done += 0 if self.under_way is None else self.under_way.pairs
        self.progress(phase, f"pairs in processes{note}", done, total)

    def tell_block(self, phase: ABPhase, what: str) -> None:
        """Report the current step of the current block."""
        self.tell(phase, f" (block {len(self.taken) + 1}: {what})")

    def windows(self) -> list[Window]:
        """All windows taken, if a block has one variant."""
        done = [window for block in self.taken for own in block.windows.values() for window in own]
        block = self.under_way
        return done if block is None else [*done, *block.windows(block.others[0])]

    def _lacking(self) -> list[str]:
        """Variants that lack a block, in descending order of missing blocks."""
        counts = Counter(name for block in self.taken for name in block.swapped)
        lacking = [name for name in self.variants if counts[name] < self.plan.process_pairs]
        return sorted(lacking, key=counts.__getitem__)

    def _turn(self, name: str) -> bool:
        """Whether it is this variant's turn to start before the baseline."""
        before = [block.swapped[name] for block in self.taken if name in block.swapped]
        return 2 * sum(before) < len(before)


class OpenBlock(Generic[Process]):
    """The current block, as `BlockSession.blocks_left` yields it; `close` ends it."""

    def __init__(
        self, session: BlockSession[Process], swapped: Mapping[str, bool], control: bool
    ) -> None:
        """Open a block.

        Args:
            swapped: by variant, see `patcher.bench.ab.blocks`; empty: the block is the control's.
            control: whether a second baseline takes part.
        """
        self.session, self.swapped = session, dict(swapped)
        self.number = len(session.taken)
        plan = session.plan
        self.names = [name for name, early in swapped.items() if early]
        """Names of its processes, in the order in which they start."""
        self.names += [BASELINE, *([CONTROL] if control else [])]
        self.names += [name for name, early in swapped.items() if not early]
        self.others = [name for name in self.names if name != BASELINE]
        """Names of the processes whose windows are paired with the baseline's."""
        rng = random.Random(f"{session.seed}:{self.number}")
        # no two rounds of a session have the same number, nor the same prompts
        first = sum(plan.taken("ab" if block.swapped else "aa") for block in session.taken)
        count, controls = plan.taken("ab" if swapped else "aa"), plan.taken("aa")
        orders = round_orders(rng, self.names, count, plan.shared)
        self.rounds = [
            BlockRound(
                number=first + index,
                block=self.number,
                order=tuple(name for name in order if name != CONTROL or index < controls),
                swapped=self.swapped,
            )
            for index, order in enumerate(orders)
        ]
        self._loaded = 0
        self._windows: dict[str, dict[tuple[int, Arm], Window]] = {name: {} for name in self.others}
        self._steps: dict[str, tuple[float, ...]] = {}
        self._peak: dict[str, int] = {}

    def loaded(self) -> Iterator[dict[str, Process]]:
        """Yield its processes, loaded and warm: all at once, or one after the other."""
        pool = self.session.pool
        for names in [self.names] if pool.together else [[name] for name in self.names]:
            processes = pool.start(names)
            self._loaded = len(processes)
            yield processes
            if not pool.together:
                pool.end()

    def take(self, processes: Mapping[str, Process]) -> None:
        """Take the windows of the loaded processes, round by round.

        Raises:
            PatcherError: a process died, or an engine gave unexpected tokens.
        """
        session = self.session
        sides = {name: process.side() for name, process in processes.items()}
        vocab_size = next(iter(processes.values())).vocab_size
        self._tell()
        for at in self.rounds:
            found = take_round(
                at, sides, session.workload, vocab_size, session.seed, session.clocks
            )
            for name, windows in found.items():
                self._windows[name] |= {(at.number, window.arm): window for window in windows}
            self._tell()

    def read_peak(self, name: str, process: Process) -> None:
        """Read a process's peak memory, before any call outside of windows."""
        if self.swapped and name != CONTROL:
            self._peak[name] = process.memory().peak

    def time_steps(self, name: str, process: Process) -> None:
        """Time its decode steps one by one, after its calls were counted."""
        if self.swapped and name != CONTROL:
            seed = prompt_seed(self.session.seed + 1, self.rounds[-1].number)
            self._steps[name] = tuple(process.in_steps(seed))

    def windows(self, name: str) -> tuple[Window, ...]:
        """Windows of that variant (or the control) and the baseline's, taken until now."""
        found = self._windows[name]
        order = [
            (at.number, arm)
            for at in self.rounds
            if name in at.order
            for arm in at.pair(name).order
        ]
        return tuple(found[each] for each in order if each in found)

    @property
    def pairs(self) -> int:
        """Number of pairs taken until now, without those of a control beside variants."""
        return sum(len(self._windows[name]) // 2 for name in self.swapped or self.others)

    def close(self) -> Block:
        """End its processes, except a reused baseline, and add its results to the session."""
        session, together = self.session, self.session.pool.together
        session.pool.end(but="" if self.swapped or not together else BASELINE)
        block = Block(
            number=self.number,
            swapped=self.swapped,
            windows={name: self.windows(name) for name in self.others},
            steps=self._steps,
            peak=self._peak,
            loaded=self._loaded,
        )
        session.taken.append(block)
        session.under_way = None
        if not together:
            session.tell(ABPhase.PAIRS, so_far(session.windows()))
        return block

    def _tell(self) -> None:
        session = self.session
        if session.plan.shared:
            session.tell_block(ABPhase.PAIRS, "taking turns")
        else:
            session.tell(ABPhase.PAIRS, so_far(session.windows() if session.pool.together else []))
