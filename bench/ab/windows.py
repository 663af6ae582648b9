"""One pair of windows: both sides decode the same prompts and take turns.

A side's engine may run in this process (`LocalSide`) or in a separate one; pairs are the same for
both.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

from patcher.bench.ab.window_clocks import block_clocks
from patcher.bench.errors import PatcherError
from patcher.bench.machine.clocks import ClockMonitor, ClockSample
from patcher.bench.stats.comparison import Arm, Window
from patcher.bench.workload import Shape, Workload

if TYPE_CHECKING:
    import torch

    from patcher.bench.engines import Decoding, Engine

TURN_STEPS = {"cpu": 8, "cuda": 64}
"""Decode steps of a turn; the first one is not timed. Short turns expose both arms to the same
conditions: on two CPU cores, turns of 32 doubled the SD of pairs. But the end of each turn adds the
difference between the client's clock and the GPU's: 0.3 ms for vLLM on an H200, and another 0.3 ms
in the next turn (`bench/results/verdict-trials`)."""

Arms = Mapping[Arm, Callable[[], AbstractContextManager[object]]]
"""Context managers that put the engine into each arm's state."""
PairKind = Literal["ab", "aa"]


class Taken(NamedTuple):
    """The result of one side in one window."""

    tokens: list[list[int]]
    """Tokens [batch][1 + steps]; the first is prefill's."""
    decode_s: float
    """Seconds of the timed steps: all but the first of each turn."""
    prefill_s: float
    kernel_calls: int | None
    turns_s: tuple[float, ...] = ()
    """Seconds of each turn's timed steps; `decode_s` is their sum."""


class Side(Protocol):
    """One arm's current window."""

    def prefill(self, seed: int) -> None:
        """Begin a window over the prompts of that seed."""
        ...

    def turn(self, steps: int) -> None:
        """Run an untimed step, since caches hold the other arm's code, then the timed ones."""
        ...

    def end(self) -> Taken:
        """End the window and return its result."""
        ...


class Pair(NamedTuple):
    """Identifies a pair, and the order of its arms."""

    number: int
    kind: PairKind
    order: tuple[Arm, Arm]
    process: int | None = None
    swapped: bool | None = None


def abba(rng: random.Random) -> Iterator[tuple[Arm, Arm]]:
    """Two pairs: one order and its mirror, in random order."""
    first: tuple[Arm, Arm] = ("baseline", "patched")
    second: tuple[Arm, Arm] = ("patched", "baseline")
    yield from (first, second) if rng.random() < 0.5 else (second, first)


def abba_orders(rng: random.Random, count: int) -> list[tuple[Arm, Arm]]:
    """Orders of some pairs, block by block; an odd number ends in half a block."""
    return [order for _ in range(-(-count // 2)) for order in abba(rng)][:count]


def prompt_seed(seed: int, pair: int) -> int:
    """Seed of a pair's prompts, which no other pair of a session shares."""
    return seed * 1_000_003 + pair + 1


Name = TypeVar("Name", bound=str)


def take_turns(
    order: Sequence[Name],
    sides: Mapping[Name, Side],
    prompts: int,
    workload: Workload,
    clocks: ClockMonitor,
) -> dict[Name, tuple[Taken, list[ClockSample]]]:
    """A window of each side over the prompts of one seed, a few steps at a time, with the sides in
    that order and back again; and the clocks after each of its turns.
    """
    seen: dict[Name, list[ClockSample]] = {name: [] for name in order}
    for name in order:
        sides[name].prefill(prompts)
    with no_gc():
        for index, turn in enumerate(turn_lengths(workload)):
            for name in order if index % 2 == 0 else order[::-1]:
                sides[name].turn(turn)
                seen[name].append(clocks.sample())
    return {name: (sides[name].end(), seen[name]) for name in order}


def take_pair(
    pair: Pair,
    sides: Mapping[Arm, Side],
    workload: Workload,
    vocab_size: int,
    seed: int,
    clocks: ClockMonitor,
) -> list[Window]:
    """Two windows over the same prompts, a few steps at a time in ABBA order. If the other side
    runs at another time and is not among `sides`, one window is cut into the same turns.

    Raises:
        PatcherError: a side gave unexpected tokens.
    """
    order: list[Arm] = [arm for arm in pair.order if arm in sides]
    taken = take_turns(order, sides, prompt_seed(seed, pair.number), workload, clocks)
    return [window_of(pair, arm, *taken[arm], workload, vocab_size) for arm in order]


def window_of(
    pair: Pair,
    arm: Arm,
    taken: Taken,
    clocks: list[ClockSample],
    workload: Workload,
    vocab_size: int,
) -> Window:
    """The window with its result; its clocks are those after each of its turns."""
    return Window(
        pair=pair.number,
        arm=arm,
        kind=pair.kind,
        tokens=count_tokens(taken.tokens, workload, vocab_size),
        decode_s=taken.decode_s,
        prefill_s=taken.prefill_s,
        **block_clocks(clocks),
        kernel_calls=taken.kernel_calls,
        turns_s=taken.turns_s,
        process=pair.process,
        swapped=pair.swapped,
    )


def turn_lengths(workload: Workload) -> list[int]:
    """Cut a window's steps into turns; a short last one joins the turn before."""
    steps, turn = workload.output_len, TURN_STEPS[workload.device]
    whole = max(steps // turn, 1)
    return [turn] * (whole - 1) + [steps - turn * (whole - 1)]


def count_tokens(tokens: list[list[int]], workload: Workload, vocab_size: int) -> int:
    """Count the timed tokens: without prefill's and the first of each turn.

    Raises:
        PatcherError: their number is unexpected, or an id is outside the vocabulary.
    """
    asked = (workload.batch, workload.output_len + 1)
    shape = (len(tokens), *sorted({len(row) for row in tokens}))
    if shape != asked:
        raise PatcherError(f"the engine gave tokens {shape}, {asked} was requested")
    if any(not 0 <= token < vocab_size for row in tokens for token in row):
        raise PatcherError("the engine gave a token id outside the vocabulary")
    return workload.batch * (workload.output_len - len(turn_lengths(workload)))


class LocalSide:
    """A side in this process: `enter` puts the engine into its state during its turns."""

    def __init__(
        self,
        engine: Engine,
        enter: Callable[[], AbstractContextManager[object]],
        kernel_calls: Callable[[], int] | None = None,
        shape: Shape | None = None,
    ) -> None:
        """Set up a side; `shape` is other traffic than the workload's."""
        self._engine, self._enter, self._count, self._shape = engine, enter, kernel_calls, shape
        self._decoding: Decoding | None = None
        self._turns: list[float] = []
        self._calls = 0

    def prefill(self, seed: int) -> None:
        prompts = self._prompts(seed)
        self._calls = 0
        self._turns = []
        with self._entered():
            self._decoding = self._engine.prefill(prompts)

    def turn(self, steps: int) -> None:
        assert self._decoding is not None
        with self._entered():
            before = self._decoding.decode_s
            self._engine.decode(self._decoding, 1)
            self._decoding.decode_s = before
            self._engine.decode(self._decoding, steps - 1)
        self._turns.append(self._decoding.decode_s - before)

    def end(self) -> Taken:
        assert self._decoding is not None
        decoding, self._decoding = self._decoding, None
        self._engine.release(decoding)
        calls = None if self._count is None else self._calls
        tokens = decoding.tokens().tolist()
        return Taken(tokens, decoding.decode_s, decoding.prefill_s, calls, tuple(self._turns))

    def _prompts(self, seed: int) -> torch.Tensor:
        if self._shape is None:
            return self._engine.prompts(seed)
        from patcher.bench.engines import random_prompts

        engine = self._engine
        return random_prompts(self._shape.of(engine.workload), engine.vocab_size, seed)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Run in this side's state of the engine, and count the patched kernel's calls."""
        count = self._count or int
        before = count()
        with self._enter():
            yield
        self._calls += count() - before


@contextmanager
def no_gc() -> Iterator[None]:
    """Disable garbage collection in windows; it runs between them."""
    on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
