"""End-to-end A/B: windows of decode with the patch on and off, interleaved in one sitting.

Both windows of a pair decode the same prompts and take turns, a few steps at a time in ABBA order,
so that neither the prompts nor a machine that drifts within a second favours an arm; which arm
begins is drawn at random. Every pair has prompts of its own, and every third pair an A/A pair
beside it: the baseline on both sides.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch

from bench.clocks import ClockMonitor
from bench.comparison import Arm, Comparison, Throughput, Window
from bench.engines import Decoding, Engine
from bench.environment import describe
from bench.errors import PatcherError
from bench.stats import compare, look_confidences
from bench.workload import Workload

CONTROL_EVERY = 3
"""One A/A pair for so many A/B pairs."""
TURN_STEPS = 8
"""Decode steps an arm takes before the other has its turn; the first of them is not timed."""
CLOCK_TOLERANCE = 0.02

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
) -> Throughput:
    """Measure until a look decides or `max_pairs` pairs are taken.

    Raises:
        PatcherError: the engine gave other tokens than asked for.
    """
    report = progress or (lambda stage, done, total: None)
    rng = random.Random(seed)
    levels = look_confidences(looks)
    windows: list[Window] = []
    warm_up(engine, arms, workload, seed)
    pair = taken = 0
    comparison: Comparison | None = None
    for look, confidence in enumerate(levels, 1):
        # the first pair is dropped as warm-up, so one more is taken
        while taken < 1 + round(max_pairs * look / looks):
            for order in abba(rng):
                windows += run_pair(engine, arms, workload, pair, "ab", order, seed, clocks)
                pair += 1
                taken += 1
                if taken % CONTROL_EVERY == 0:
                    windows += run_pair(engine, arms, workload, pair, "aa", order, seed, clocks)
                    pair += 1
                report("A/B pairs", taken, max_pairs + 1)
        comparison = decide_on(windows, "ab", margin_pct, confidence)
        if comparison.verdict != "inconclusive":
            break
    assert comparison is not None
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


def run_pair(
    engine: Engine,
    arms: Arms,
    workload: Workload,
    pair: int,
    kind: Kind,
    order: tuple[Arm, Arm],
    seed: int,
    clocks: ClockMonitor,
) -> list[Window]:
    """Two windows over the same prompts; an A/A pair runs the baseline under both names."""
    prompts = engine.prompts(seed * 1_000_003 + pair + 1)
    enter = {arm: arms["baseline" if kind == "aa" else arm] for arm in order}
    decoding = {}
    for arm in order:
        with enter[arm]():
            decoding[arm] = engine.prefill(prompts)
    turns = turn_lengths(workload.output_len)
    with _no_gc():
        for index, steps in enumerate(turns):
            for arm in order if index % 2 == 0 else order[::-1]:
                with enter[arm]():
                    take_turn(engine, decoding[arm], steps)
    clock = clocks.sample()
    return [
        Window(
            pair=pair,
            arm=arm,
            kind=kind,
            tokens=count_tokens(decoding[arm].tokens(), workload, engine, len(turns)),
            decode_s=decoding[arm].decode_s,
            prefill_s=decoding[arm].prefill_s,
            sm_clock_mhz=clock.sm_mhz,
            temperature_c=clock.temperature_c,
            throttle_reasons=clock.throttle,
        )
        for arm in order
    ]


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
) -> Comparison:
    """Compare the windows of one kind; pairs whose clocks drifted or throttled are left out."""
    chosen = [window for window in windows if window.kind == kind]
    return compare(
        chosen,
        margin_pct,
        confidence_pct,
        warmup_pairs=1 if kind == "ab" else 0,
        dropped_pairs=unfit_pairs(windows),
    )


def unfit_pairs(windows: list[Window]) -> frozenset[int]:
    """Pairs with a throttled window or one off the sitting's median SM clock."""
    seen = [window.sm_clock_mhz for window in windows if window.sm_clock_mhz is not None]
    middle = statistics.median(seen) if seen else 0
    return frozenset(
        window.pair
        for window in windows
        if window.throttle_reasons
        or (
            window.sm_clock_mhz is not None
            and abs(window.sm_clock_mhz - middle) > CLOCK_TOLERANCE * middle
        )
    )


@contextmanager
def _no_gc() -> Iterator[None]:
    """Collections happen between windows, not in them."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
