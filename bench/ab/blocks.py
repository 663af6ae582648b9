"""End-to-end A/B with a process for each arm, in blocks: for engines that are patched when they
start, and to average out differences between processes.

Two processes of one program differ by about 0.1 % for as long as they live, which no number of
pairs averages out. So pairs are taken in several *blocks*, each of freshly started processes: the
baseline, and one for each of its *variants* (an engine with some patches). In each *round* all of
them decode the same prompts and take turns, a few steps at a time. The baseline's one window forms
a pair with that of every variant.

A block with one variant is a *process pair*, and its rounds are ABBA. The A/A control is a block
whose variant is a second baseline, taken first: an A/A within one process would not show the
difference between processes. Its first process is reused as the baseline of the next block.

If more processes fit side by side, several variants share the baseline (`ABPlan.shared`). Their
order in a round is random and mirrored in the next one, and the control is in the first block. For
each variant such a block counts as a process pair, and each variant is in equally many of them,
each with a warm-up round. Sharing the baseline's windows makes the comparisons dependent: the error
of a baseline window is in all of them. Each comparison by itself is unaffected, and Holm's
correction allows any dependence, since it rests on Bonferroni's inequality.

`swapped` says of a variant that its process started before the baseline's, and so allocated memory
first; its place among the variants does not matter. It alternates for each variant.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from patcher.bench.ab.records import Throughput
from patcher.bench.ab.throughput import compare_windows, of_processes, unusable
from patcher.bench.ab.windows import Pair, Side, abba_orders, prompt_seed, take_turns, window_of
from patcher.bench.machine.clocks import ClockMonitor
from patcher.bench.records import SCHEMA_VERSION, Record
from patcher.bench.stats.comparison import Arm, Window
from patcher.bench.workload import Workload

BASELINE, CONTROL = "baseline", "a second baseline"
"""Names of the processes of no variant."""
FIRST_CONTROL = 500_000
"""First number of A/A pairs in shared blocks, so that none has the number and prompts of an A/B
pair."""


class Block(Record):
    """The result of one block."""

    schema_version: int = SCHEMA_VERSION
    number: int
    swapped: dict[str, bool]
    """Whether the processes started in swapped order, by variant. Empty: the block is the
    control's."""
    windows: dict[str, tuple[Window, ...]]
    """Windows by variant, and of the control in the first block; each includes the baseline's."""
    steps: dict[str, tuple[float, ...]]
    """Step seconds by process except the control, see `patcher.bench.ab.latency.in_steps`."""
    peak: dict[str, int]
    """Peak memory in bytes by process except the control."""
    loaded: int
    """Number of processes loaded at once."""


class BlockRound(NamedTuple):
    """One round: its number, and the processes in their order."""

    number: int
    block: int
    order: tuple[str, ...]
    swapped: Mapping[str, bool]
    """See `Block.swapped`."""

    def pair(self, name: str) -> Pair:
        """The pair of the baseline's window and that process's."""
        arms: dict[str, Arm] = {BASELINE: "baseline", name: "patched"}
        order: list[Arm] = [arms[each] for each in self.order if each in arms]
        control = name == CONTROL
        return Pair(
            number=self.number + (FIRST_CONTROL if control and self.swapped else 0),
            kind="aa" if control else "ab",
            order=(order[0], order[1]),
            process=self.block,
            swapped=self.swapped.get(name, False),
        )


def mirrored(rng: random.Random, names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Orders of some rounds: one at random, its mirror, the next one at random."""
    drawn = (tuple(rng.sample(names, len(names))) for _ in range(-(-count // 2)))
    return [order for first in drawn for order in (first, first[::-1])][:count]


def round_orders(
    rng: random.Random, names: Sequence[str], count: int, shared: bool
) -> list[tuple[str, ...]]:
    """Orders of some rounds of a block: ABBA if the baseline has one variant (see `shared`)."""
    if shared:
        return mirrored(rng, names, count)
    [variant] = [name for name in names if name != BASELINE]
    of: dict[Arm, str] = {"baseline": BASELINE, "patched": variant}
    return [(of[first], of[second]) for first, second in abba_orders(rng, count)]


def take_round(
    at: BlockRound,
    sides: Mapping[str, Side],
    workload: Workload,
    vocab_size: int,
    seed: int,
    clocks: ClockMonitor,
) -> dict[str, list[Window]]:
    """By variant (or control) its window and the baseline's, in the order of their first turns. A
    process that is loaded at another time is not among `sides` and has no window.

    Raises:
        PatcherError: a side gave unexpected tokens.
    """
    here = [name for name in at.order if name in sides]
    taken = take_turns(here, sides, prompt_seed(seed, at.number), workload, clocks)
    found: dict[str, list[Window]] = {}
    for name in at.order:
        if name == BASELINE:
            continue
        pair = at.pair(name)
        names: dict[Arm, str] = {"baseline": BASELINE, "patched": name}
        found[name] = [
            window_of(pair, arm, *taken[names[arm]], workload, vocab_size)
            for arm in pair.order
            if names[arm] in taken
        ]
    return found


def throughput_of(
    name: str,
    blocks: Sequence[Block],
    workload: Workload,
    margin_pct: float,
    clocks: ClockMonitor,
    residency: str,
) -> Throughput:
    """The result of the blocks for one variant; the control is shared by all.

    Args:
        residency: see `Throughput.residency`.

    Raises:
        PatcherError: no pair was usable.
    """
    own = [block for block in blocks if name in block.swapped]
    windows = [window for block in blocks for window in block.windows.get(CONTROL, ())]
    windows += [window for block in own for window in block.windows[name]]
    comparison = compare_windows(windows, "ab", margin_pct, 95.0)
    if comparison is None:
        raise unusable(len({window.pair for window in windows}), clocks)
    arms: dict[Arm, str] = {"baseline": BASELINE, "patched": name}
    return of_processes(
        workload,
        name,
        comparison,
        windows,
        {arm: [s for block in own for s in block.steps[each]] for arm, each in arms.items()},
        {arm: [block.peak[each] for block in own] for arm, each in arms.items()},
        residency,
        margin_pct,
        clocks,
    )
