"""What other programs do to a measurement: it is repeated, and gains nobody anything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from patcher.bench.judge.clockcheck import TimedBlock, below_floor, of_pairs
from patcher.bench.judge.disturbances import drowned, undrained, unsteady
from patcher.bench.judge.process import Spent
from patcher.bench.judge.timed_arm import EmptyCommands, TimedArm
from patcher.bench.judge.timing import TimingSession
from patcher.bench.sandbox import process_tree
from patcher.bench.sandbox.process_tree import ThreadTime

PAIRS, CALLS = 12, 24


def blocks(call_us: float, seed: int = 0, waited_us: float = 0.0) -> list[TimedBlock]:
    """Blocks of calls with 5 % noise."""
    draw = random.Random(seed)
    each = [call_us * draw.uniform(0.97, 1.05) for _ in range(PAIRS)]
    return [TimedBlock([us], CALLS, us * CALLS + 300.0, waited_us) for us in each]


THEIRS = blocks(20.0)


def test_a_baseline_that_waits_for_other_programs_is_no_yardstick() -> None:
    """Seen on two busy cores: 8 ms in place of 0.03 for some blocks, and a speedup of 313."""
    assert unsteady(THEIRS) is None
    doubled = blocks(40.0, seed=5)
    assert unsteady(THEIRS[:6] + doubled[:6]) is None  # two states of a clock are no storm
    waiting = blocks(8000.0, seed=6)
    problem = unsteady(THEIRS[:5] + waiting[:7])
    assert problem is not None
    assert "8" in problem


def test_a_thread_of_the_baseline_that_waits_in_all_blocks_alike_is_no_yardstick() -> None:
    """Seen on two busy cores: 7 ms in place of 0.08 for all blocks, and a speedup of 270."""
    waiting = blocks(7300.0, waited_us=95_000.0)
    assert unsteady(blocks(7300.0)) is None
    problem = unsteady(waiting)
    assert problem is not None
    assert "95" in problem
    assert unsteady(THEIRS[:7] + waiting[:5]) is not None, "the blocks differ"
    assert unsteady(blocks(20.0, waited_us=1100.0)) is None, "one tick holds nobody up"
    assert unsteady(blocks(7300.0, waited_us=4000.0)) is None, "a small share of a long block"


class Stopped:
    """A trusted or a foreign runner whose command takes 8 ms."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self.cpus = list(cpus)

    def stop(self) -> set[int]:
        return {1}

    def strayed_cpus(self) -> list[int]:
        return []

    def clocked(self, do: str, **arguments: Any) -> tuple[dict[str, Any], Spent]:
        return {}, Spent(8000.0, 8000.0, 0.0)


@pytest.mark.parametrize(
    ("checked", "cpus", "waited_us"), [(False, 2, 6000.0), (True, 2, 0.0), (False, 1, 0.0)]
)
def test_waits_are_told_of_the_baseline_on_several_cpus(
    monkeypatch: pytest.MonkeyPatch, checked: bool, cpus: int, waited_us: float
) -> None:
    """A candidate cannot end its own trial, and on one CPU its time counts and not the clock."""
    times = iter(({1: ThreadTime(1.0, 0.0)}, {1: ThreadTime(1.008, 0.006)}))
    monkeypatch.setattr(process_tree, "thread_times", lambda _: next(times))
    runner, nothing = Stopped(range(cpus)), EmptyCommands()
    nothing.add(Spent(0.0, 0.0, 0.0))
    made: Any = {"op": None, "device": "cpu", "runner": runner, "stock": None, "checked": checked}
    block = TimedArm(**made, empty=nothing)._gone(4)
    assert block.waited_us == pytest.approx(waited_us)
    assert block.figure == 2000.0


def test_noise_above_a_block_at_the_floor_accuses_nobody() -> None:
    """Seen on two busy cores: nothing was left of an honest kernel's blocks, at two threads."""
    empty = EmptyCommands()
    for wall_us in (100.0, 110.0, 120.0):
        empty.add(Spent(40, wall_us, 0))
    nothing = [TimedBlock([1e-3], 50, 100.0)] * 6
    assert below_floor(nothing, 10.0)
    assert empty.spread_us(2) == 20
    assert drowned(nothing, 10.0, empty.spread_us(2)) is None, "it would have been seen"
    empty.add(Spent(40, 9100, 9000))
    noise = drowned(nothing, 10.0, empty.spread_us(2))
    assert noise is not None
    assert "9e+03" in noise
    assert empty.spread_us(1) == 0, "on one CPU the wait does not count"


def test_a_block_of_which_an_empty_command_leaves_nothing_is_no_gain() -> None:
    """Seen on two busy cores: an interval of 11 to 956 about a speedup of 12."""
    few = [3.0, 2.4, 1e-3, 4.0, 3.3, 1e-3, 2.6, 3.1, 1e-3, 3.4, 1e-3, 2.9]
    ours = [TimedBlock([us], CALLS, 300.0) for us in few]
    theirs = blocks(36.0)
    assert of_pairs(ours, theirs).high > 5
    kept = undrained(ours)
    assert [each.figure for each in kept if each.figure >= 2] == [us for us in few if us >= 2]
    assert min(each.figure for each in kept) == pytest.approx(2.75 / 4)
    assert of_pairs(kept, theirs).high < 4
    assert undrained(theirs) == theirs
    nothing = [replace(each, times_us=[1e-3]) for each in ours]
    assert undrained(nothing) == nothing, "the floor and its noise tell what that is"


def test_a_measurement_on_a_cpu_has_no_drained_block(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = TimingSession.__new__(TimingSession)
    ours = [*blocks(3.0)[1:], TimedBlock([1e-3], CALLS, 300.0)]
    theirs = [*blocks(36.0)[1:], TimedBlock([1e-3], CALLS, 300.0)]
    session.device, session.precision = "cpu", SimpleNamespace(tells=True)
    session.op = SimpleNamespace(contract=None)
    session.ceilings = SimpleNamespace(floor_us=lambda *_: 0.1)
    monkeypatch.setattr(session, "_pairs", lambda *_: (ours, theirs, 0))
    monkeypatch.setattr(session, "_one_by_one", lambda *_: list(zip(ours, theirs, strict=True)))
    measured = session._measured(None, CALLS)
    assert measured.problem is None
    assert min(block.figure for block in measured.ours) > 0.7
    assert min(block.figure for block in measured.theirs) > 8
