"""End-to-end A/B: windows of decode with the patch on and off, interleaved in one sitting.

Both windows of a pair decode the same prompts and take turns, a few steps at a time in ABBA order,
so that neither the prompts nor a machine that drifts within a second favours an arm; which arm
begins is drawn at random. Every pair has prompts of its own, and every third pair an A/A pair
beside it: the baseline on both sides.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from bench.clock_blocks import block_clocks, unfit
from bench.clocks import ClockMonitor, ClockSample
from bench.comparison import Arm, Comparison, Throughput, Window
from bench.engines import Decoding, Engine
from bench.environment import describe
from bench.errors import PatcherError, UsageError
from bench.intervals import Look, first_decided, schedule
from bench.stats import compare
from bench.workload import Workload

CONTROL_EVERY = 3
"""One A/A pair for so many A/B pairs."""
TURN_STEPS = 8
"""Decode steps an arm takes before the other has its turn; the first of them is not timed."""

Arms = Mapping[Arm, Callable[[], AbstractContextManager[object]]]
"""What puts the engine into each arm's state and takes it out again."""
Kind = Literal["ab", "aa"]


def measure(
    engine: Engine,
    arms: Arms,
    workload: Workload,
    *,
    margin_pct: float,
    max_pairs: int,
    looks: int,
    patch_id: str | None,
    clocks: ClockMonitor,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
    kernel_calls: Callable[[], int] | None = None,
) -> Throughput:
    """Measure until a look decides or `max_pairs` pairs are taken.

    Args:
        kernel_calls: how often the patched kernel has run so far, to be told apart by window.

    Raises:
        UsageError: a window too short to time.
        PatcherError: the engine gave other tokens than asked for, or every pair was unfit.
    """
    if workload.output_len < 2:
        raise UsageError(
            "a window of 1 decode step leaves nothing to time", "ask for 2 decode steps or more"
        )
    report = progress or (lambda stage, done, total: None)
    rng = random.Random(seed)
    planned = schedule(max_pairs, looks)
    windows: list[Window] = []
    sitting = Sitting(engine, arms, workload, seed, clocks, kernel_calls)
    warm_up(engine, arms, workload, seed)
    pair = taken = 0

    def at(look: Look) -> Comparison | None:
        nonlocal pair, taken
        while taken < look.taken:
            for order in abba(rng):
                windows.extend(sitting.pair(pair, "ab", order))
                pair += 1
                taken += 1
                if taken % CONTROL_EVERY == 0:
                    windows.extend(sitting.pair(pair, "aa", order))
                    pair += 1
                report("A/B pairs", taken, planned[-1].taken)
        return decide_on(windows, "ab", margin_pct, look.confidence_pct)

    comparison = first_decided(planned, at)
    if comparison is None:
        raise PatcherError(
            f"none of {taken} pairs can be used: their clocks drifted or throttled "
            f"({clocks.description})",
            "let the GPU cool, stop what else runs on it, or lock its clocks lower",
        )
    return Throughput(
        workload=workload,
        patch=patch_id,
        comparison=comparison,
        control=decide_on(windows, "aa", margin_pct, 95.0),
        windows=tuple(windows),
        routing_entropy_pct=engine.routing_entropy_pct(engine.prompts(seed), 16),
        clocks=clocks.description,
        environment=describe(workload.device, torch.get_num_threads(), clocks.description),
    )


def warm_up(engine: Engine, arms: Arms, workload: Workload, seed: int) -> None:
    """Both arms once, untimed: lazy set-up belongs to neither."""
    for enter in arms.values():
        with enter():
            engine.generate(engine.prompts(seed), min(workload.output_len, 8))


def abba(rng: random.Random) -> Iterator[tuple[Arm, Arm]]:
    """Two pairs: one order and its mirror, which comes first drawn at random."""
    first: tuple[Arm, Arm] = ("baseline", "patched")
    second: tuple[Arm, Arm] = ("patched", "baseline")
    yield from (first, second) if rng.random() < 0.5 else (second, first)


@dataclass(frozen=True)
class Sitting:
    """What all pairs of one measurement share."""

    engine: Engine
    arms: Arms
    workload: Workload
    seed: int
    clocks: ClockMonitor
    kernel_calls: Callable[[], int] | None = None

    def pair(self, pair: int, kind: Kind, order: tuple[Arm, Arm]) -> list[Window]:
        """Two windows over the same prompts; an A/A pair runs the baseline under both names."""
        prompts = self.engine.prompts(self.seed * 1_000_003 + pair + 1)
        sides = {arm: Side(self, "baseline" if kind == "aa" else arm) for arm in order}
        for arm in order:
            sides[arm].prefill(prompts)
        turns = turn_lengths(self.workload.output_len)
        with _no_gc():
            for index, steps in enumerate(turns):
                for arm in order if index % 2 == 0 else order[::-1]:
                    sides[arm].turn(steps)
        return [sides[arm].window(pair, arm, kind, len(turns)) for arm in order]


class Side:
    """One window under way."""

    def __init__(self, sitting: Sitting, state: Arm) -> None:
        self._sitting, self._enter = sitting, sitting.arms[state]
        self._decoding: Decoding | None = None
        self._calls = 0
        self._clocks: list[ClockSample] = []

    def prefill(self, prompts: torch.Tensor) -> None:
        with self._entered():
            self._decoding = self._sitting.engine.prefill(prompts)

    def turn(self, steps: int) -> None:
        assert self._decoding is not None
        with self._entered():
            take_turn(self._sitting.engine, self._decoding, steps)
        self._clocks.append(self._sitting.clocks.sample())

    def window(self, pair: int, arm: Arm, kind: Kind, turns: int) -> Window:
        """The window as it was; its clocks are those between its turns."""
        assert self._decoding is not None
        sitting = self._sitting
        tokens = self._decoding.tokens()
        return Window(
            pair=pair,
            arm=arm,
            kind=kind,
            tokens=count_tokens(tokens, sitting.workload, sitting.engine, turns),
            decode_s=self._decoding.decode_s,
            prefill_s=self._decoding.prefill_s,
            **block_clocks(self._clocks),
            kernel_calls=None if sitting.kernel_calls is None else self._calls,
        )

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """In this side's state of the engine, the patched kernel's calls counted."""
        count = self._sitting.kernel_calls or int
        before = count()
        with self._enter():
            yield
        self._calls += count() - before


def turn_lengths(steps: int) -> list[int]:
    """Steps cut into turns; a short last one joins the turn before."""
    whole = max(steps // TURN_STEPS, 1)
    return [TURN_STEPS] * (whole - 1) + [steps - TURN_STEPS * (whole - 1)]


def take_turn(engine: Engine, decoding: Decoding, steps: int) -> None:
    """One step that is not timed, since caches still hold the other arm's code, then the rest."""
    before = decoding.decode_s
    engine.decode(decoding, 1)
    decoding.decode_s = before
    engine.decode(decoding, steps - 1)


def count_tokens(tokens: torch.Tensor, workload: Workload, engine: Engine, turns: int) -> int:
    """Timed tokens as the caller counts them: without prefill's and the first of each turn.

    Raises:
        PatcherError: not the shape asked for, or an id outside the vocabulary.
    """
    asked = (workload.batch, workload.output_len + 1)
    if tuple(tokens.shape) != asked:
        raise PatcherError(f"the engine gave tokens {tuple(tokens.shape)}, {asked} was asked for")
    if int(tokens.min()) < 0 or int(tokens.max()) >= engine.vocab_size:
        raise PatcherError("the engine gave a token id outside the vocabulary")
    return workload.batch * (workload.output_len - turns)


def decide_on(
    windows: list[Window], kind: Kind, margin_pct: float, confidence_pct: float
) -> Comparison | None:
    """Compare the windows of one kind; pairs whose clocks drifted or throttled are left out.

    None when no pair is left.
    """
    chosen = [window for window in windows if window.kind == kind]
    warmup, drop = 1 if kind == "ab" else 0, unfit_pairs(windows)
    order = list(dict.fromkeys(window.pair for window in chosen))
    if not set(order[warmup:]) - drop:
        return None
    return compare(chosen, margin_pct, confidence_pct, warmup, drop)


def unfit_pairs(windows: list[Window]) -> frozenset[int]:
    """Pairs that their clocks make unfit, see `bench.clock_blocks.unfit`."""
    return frozenset(unfit(windows))


@contextmanager
def _no_gc() -> Iterator[None]:
    """Collections happen between windows, not in them."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
