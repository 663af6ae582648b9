"""End-to-end A/B of several patched engines against one baseline, in waves.

A *wave* is freshly started processes, loaded side by side: the baseline, and one for each of as
many *variants* (an engine with some patches in) as fit. In each *round* all of them decode the same
prompts and take turns, a few steps at a time, in an order drawn at random and mirrored in the next
round: the baseline's one window is a pair with that of every variant. So for each variant a wave is
what a process pair is in `ab.process_pairs`, and it is in as many of them, each with a warm-up
round. The first wave has a second baseline, too: the A/A control of all.

`swapped` says of a variant that its process was started before the baseline's, and so was the first
to take memory; where it stands among the variants is not swapped. It alternates for each variant.

That variants share the baseline's windows makes their comparisons dependent: what one window of the
baseline is off by is in all of them at once. Each comparison for itself is what it would be with
windows of its own, and Holm's correction over them allows any dependence, since it rests on
Bonferroni's inequality alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from patcher.bench.ab.processes import SHARE_BESIDE, WARM_UP_STEPS, ABPlan, Process, open_all
from patcher.bench.ab.records import Throughput
from patcher.bench.ab.throughput import check_window, decide_on, of_processes, unusable
from patcher.bench.ab.windows import Pair, Side, prompt_seed, take_turns, window_of
from patcher.bench.errors import MissingError, PatcherError, UsageError
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Window
from patcher.bench.workload import Workload

BASELINE, CONTROL = "baseline", "a second baseline"
"""Names of the processes that are no variant's."""
MIN_ROOM = 3
"""Processes; where fewer fit side by side, a wave would be a process pair."""
FIRST_CONTROL = 500_000
"""So that no A/A pair has the number of an A/B pair, whose prompts it shares."""


class Block(Record):
    """What one wave gave."""

    schema_version: int = SCHEMA_VERSION
    number: int
    swapped: dict[str, bool]
    """By variant; all that were in it."""
    windows: dict[str, tuple[Window, ...]]
    """By variant, and of the control in the first wave; the baseline's are in each."""
    steps: dict[str, tuple[float, ...]]
    """By process but the control's: seconds, see `patcher.bench.ab.latency.in_steps`."""
    peak: dict[str, int]
    """Likewise: peak memory in bytes."""
    loaded: int
    """Processes at once."""


class BlockRound(NamedTuple):
    """Which round it is, and who takes part in what order."""

    number: int
    wave: int
    order: tuple[str, ...]
    swapped: Mapping[str, bool]


Begin = Callable[[Process], None]
"""Called with the first baseline of all, warm, before any variant is started."""
Visit = Callable[[int, str, Process], None]
"""Called with the wave and each process after the rounds: what else is asked of it."""
Also = Callable[[int, Mapping[str, bool], Mapping[str, Process]], None]
"""Called after the visits with the wave, `Block.swapped`, and the processes but the control's: what
else is measured between them."""


def mirrored(rng: random.Random, names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Orders of so many rounds: one drawn at random, its mirror, the next one drawn."""
    drawn = (tuple(rng.sample(names, len(names))) for _ in range(-(-count // 2)))
    return [order for first in drawn for order in (first, first[::-1])][:count]


def take_round(
    at: BlockRound,
    sides: Mapping[str, Side],
    workload: Workload,
    vocab_size: int,
    seed: int,
    clocks: ClockMonitor,
) -> dict[str, list[Window]]:
    """By variant (or control) its window and the baseline's, in the order of their first turns.

    Raises:
        PatcherError: a side gave other tokens than asked for.
    """
    taken = take_turns(at.order, sides, prompt_seed(seed, at.number), workload, clocks)
    found: dict[str, list[Window]] = {}
    for name in at.order:
        if name == BASELINE:
            continue
        arms: dict[str, Arm] = {BASELINE: "baseline", name: "patched"}
        first, second = (each for each in at.order if each in arms)
        pair = Pair(
            number=at.number + (FIRST_CONTROL if name == CONTROL else 0),
            kind="aa" if name == CONTROL else "ab",
            order=(arms[first], arms[second]),
            process=at.wave,
            swapped=at.swapped.get(name, False),
        )
        found[name] = [
            window_of(pair, arms[each], *taken[each], workload, vocab_size)
            for each in (first, second)
        ]
    return found


@dataclass
class BlockSession(Generic[Process]):
    """Takes the waves that are missing; no process outlives one."""

    names: tuple[str, ...]
    """Of the variants."""
    start: Callable[[str, float], Process]
    """Starts that process with such a share of the device's memory, waits until it is loaded."""
    workload: Workload
    plan: ABPlan
    clocks: ClockMonitor
    begin: Begin[Process]
    visit: Visit[Process]
    also: Also[Process]
    keep: Callable[[Block], None]
    """Called with each wave once it is whole."""
    waves: list[Block] = field(default_factory=list)
    """Those that were taken before, also."""
    seed: int = 0
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    room: int | None = None
    """Processes that fit side by side; None: not yet known."""
    _first: Process | None = None
    """The baseline that showed the room."""
    _open: list[Process] = field(default_factory=list)
    _pairs: int = 0

    def run(self) -> bool:
        """Take what is missing; False where fewer than `MIN_ROOM` fit, and nothing is taken then.

        Raises:
            UsageError: a window too short to time.
            PatcherError: a process died, or an engine gave other tokens than asked for.
        """
        check_window(self.workload)
        self._pairs = self.plan.taken("ab") * sum(len(wave.swapped) for wave in self.waves)
        while chosen := self._wanted():
            try:
                if self.room is None:
                    self.room = self._find_room()
                if self.room < MIN_ROOM:
                    return False
                wave = self._wave(chosen, self.room)
            finally:
                self._close()
            self.waves.append(wave)
            self.keep(wave)
        return True

    def _wanted(self) -> list[str]:
        """Who lacks a wave, who lacks most first."""
        counts = Counter(name for wave in self.waves for name in wave.swapped)
        lacking = [name for name in self.names if counts[name] < self.plan.process_pairs]
        return sorted(lacking, key=counts.__getitem__)

    def _find_room(self) -> int:
        """By what a baseline takes, which goes on as that of the first wave if there is room."""
        self._tell("loading the baseline")
        try:
            first = self._started(BASELINE, SHARE_BESIDE)
        except (MissingError, UsageError):
            raise  # that is no matter of memory
        except PatcherError as error:
            self._tell(f"in half of the memory it does not start: {error.message[:200]}")
            return 1
        self._first = first
        room = first.memory().room
        self._tell(f"{room} fit side by side")
        return room

    def _wave(self, chosen: list[str], room: int) -> Block:
        number = len(self.waves)
        first, self._first = self._first, None
        control = () if self.waves else (CONTROL,)
        chosen = chosen[: room - 1 - len(control)]
        swapped = {name: first is None and self._turn(name) for name in chosen}
        begun = [name for name in chosen if swapped[name]]
        begun += [BASELINE, *control, *(name for name in chosen if not swapped[name])]
        opened: dict[str, Process] = {} if first is None else {BASELINE: first}
        if first is not None and not self.waves:
            self.begin(first)
        opened |= open_all(
            [name for name in begun if name not in opened],
            lambda name: self._opened(name, 2 * SHARE_BESIDE / len(begun)),
            self.plan.stagger_s,
        )
        windows = self._rounds(number, opened, swapped)
        last = self._number(number, self.plan.taken("ab") - 1)
        steps: dict[str, tuple[float, ...]] = {}
        peak: dict[str, int] = {}
        for name, process in opened.items():
            self._tell(f"asking {name}")
            if name != CONTROL:
                peak[name] = process.memory().peak
            self.visit(number, name, process)  # counts calls: none yet that no window is of
            if name != CONTROL:
                steps[name] = tuple(process.in_steps(prompt_seed(self.seed + 1, last)))
        others = {name: process for name, process in opened.items() if name != CONTROL}
        self.also(number, swapped, others)
        return Block(
            number=number,
            swapped=swapped,
            windows={name: tuple(every) for name, every in windows.items()},
            steps=steps,
            peak=peak,
            loaded=len(opened),
        )

    def _rounds(
        self, number: int, opened: Mapping[str, Process], swapped: Mapping[str, bool]
    ) -> dict[str, list[Window]]:
        count, controls = self.plan.taken("ab"), self.plan.taken("aa")
        rng = random.Random(f"{self.seed}:{number}")
        sides = {name: process.side() for name, process in opened.items()}
        windows: dict[str, list[Window]] = {name: [] for name in opened if name != BASELINE}
        for index, order in enumerate(mirrored(rng, list(opened), count)):
            if index >= controls:
                order = tuple(name for name in order if name != CONTROL)
            at = BlockRound(self._number(number, index), number, order, swapped)
            vocab_size = opened[BASELINE].vocab_size
            for name, two in take_round(
                at, sides, self.workload, vocab_size, self.seed, self.clocks
            ).items():
                windows[name] += two
            self._pairs += len(swapped)
            self._tell("taking turns")
        return windows

    def _number(self, wave: int, index: int) -> int:
        """Of a round: no two rounds of a sitting share theirs, nor their prompts."""
        return wave * self.plan.taken("ab") + index

    def _turn(self, name: str) -> bool:
        """Whether it is this variant's turn to start before the baseline."""
        before = [wave.swapped[name] for wave in self.waves if name in wave.swapped]
        return 2 * sum(before) < len(before)

    def _opened(self, name: str, share: float) -> Process:
        self._tell(f"loading {name}")
        return self._started(name, share)

    def _started(self, name: str, share: float) -> Process:
        process = self.start(name, share)
        self._open.append(process)
        process.warm_up(prompt_seed(self.seed, -1), min(self.workload.output_len, WARM_UP_STEPS))
        return process

    def _close(self) -> None:
        """Side by side: an engine may take seconds to end."""
        with ThreadPoolExecutor(max(len(self._open), 1)) as pool:
            ended = [pool.submit(process.close) for process in self._open]
        self._first = None
        self._open.clear()
        for one in ended:
            one.result()

    def _tell(self, note: str) -> None:
        """Pairs that were taken, of all."""
        total = self.plan.taken("ab") * self.plan.process_pairs * len(self.names)
        self.progress(f"waves (wave {len(self.waves) + 1}: {note})", self._pairs, total)


def throughput_of(
    name: str,
    waves: Sequence[Block],
    workload: Workload,
    margin_pct: float,
    clocks: ClockMonitor,
) -> Throughput:
    """What the waves say of one variant; the control is that of all.

    Raises:
        PatcherError: every pair was unfit.
    """
    own = [wave for wave in waves if name in wave.swapped]
    windows = [window for wave in waves for window in wave.windows.get(CONTROL, ())]
    windows += [window for wave in own for window in wave.windows[name]]
    comparison = decide_on(windows, "ab", margin_pct, 95.0)
    if comparison is None:
        raise unusable(len({window.pair for window in windows}), clocks)
    arms: dict[Arm, str] = {"baseline": BASELINE, "patched": name}
    loaded = max(wave.loaded for wave in own)
    return of_processes(
        workload,
        name,
        comparison,
        windows,
        {arm: [s for wave in own for s in wave.steps[each]] for arm, each in arms.items()},
        {arm: [wave.peak[each] for wave in own] for arm, each in arms.items()},
        f"{loaded} processes loaded at once, idle but for the one that has its turn; "
        "one baseline for all that were measured beside it",
        margin_pct,
        clocks,
    )
