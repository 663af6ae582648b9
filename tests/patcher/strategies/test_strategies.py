"""What each strategy asks next, as a function of the attempts alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tried_sample import SHAPES, tried

from patcher.attempts.history import CandidateRequest, IterationResult, best_of, rounds, standing
from patcher.bench import Outcome, UsageError
from patcher.strategies import (
    STRATEGIES,
    Beam,
    Evolve,
    IndependentSamples,
    Refine,
    Single,
    open_strategy,
)
from patcher.strategies.beam import PATIENCE
from patcher.strategies.designs import designs
from patcher.strategies.evolve import MIGRATION

BROKEN = Outcome.MISMATCH


def asked(asks: Sequence[CandidateRequest]) -> list[tuple[str, tuple[int, ...]]]:
    return [(ask.kind, ask.parents) for ask in asks]


def test_one_shot() -> None:
    assert asked(Single().next((), 8)) == [("generate", ())]
    assert Single().next((tried(0, BROKEN),), 7) == ()


def test_sampling_asks_for_as_many_as_are_left_and_heeds_nothing() -> None:
    first = IndependentSamples(4).next((), 6)
    assert asked(first) == [("generate", ())] * 4
    assert [ask.draw for ask in first] == [0, 1, 2, 3]
    seen = tuple(tried(n, BROKEN if n % 2 else 2.0, round=0) for n in range(4))
    second = IndependentSamples(4).next(seen, 2)
    assert [ask.draw for ask in second] == [4, 5]
    assert asked(second) == [("generate", ())] * 2


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], ("generate", ())),
        ([tried(0, BROKEN)], ("repair", (0,))),
        ([tried(0, BROKEN), tried(1, BROKEN, "repair", (0,))], ("repair", (1,))),
        ([tried(0, 0.9)], ("optimise", (0,))),
        ([tried(0, 1.2), tried(1, BROKEN, "optimise", (0,))], ("repair", (1,))),
        (
            [
                tried(0, 1.2),
                tried(1, BROKEN, "optimise", (0,)),
                tried(2, BROKEN, "repair", (1,)),
            ],
            ("optimise", (0,)),
        ),
        ([tried(0, 1.2), tried(1, 1.1, "optimise", (0,))], ("optimise", (0,))),
        ([tried(0, 1.2), tried(1, 1.3, "optimise", (0,))], ("optimise", (1,))),
        ([tried(0, 0.9), tried(1, 1.0, "optimise", (0,))], ("optimise", (1,))),
    ],
)
def test_refinement(history: list[IterationResult], expected: tuple[str, tuple[int, ...]]) -> None:
    assert asked(Refine().next(history, 3)) == [expected]


def test_refinement_says_what_reply_it_makes_up_for() -> None:
    [ask] = Refine().next((tried(0, BROKEN), tried(1, None, "repair", (0,))), 3)
    assert (ask.kind, ask.parents, ask.after) == ("repair", (0,), 1)
    [ask] = Refine().next((tried(0, None),), 3)
    assert (ask.kind, ask.after) == ("generate", 0)


def test_designs_differ_in_structure_not_in_text() -> None:
    history = [tried(0, 1.5), tried(1, 1.9), tried(2, 1.2, shape=1), tried(3, 3.0, shape=2)]
    history += [tried(4, BROKEN, shape=3), tried(5, 0.8, shape=4)]
    assert [one.iteration for one in designs(history, 9)] == [3, 1, 2, 5]
    assert [one.iteration for one in designs(history, 2)] == [3, 1]


def test_a_beam_begins_with_new_designs_then_improves_those_that_differ() -> None:
    beam = Beam(3)
    assert asked(beam.next((), 8)) == [("generate", ())] * 3
    first = (
        tried(0, 1.5, round=0),
        tried(1, 1.4, round=0),  # the same design, slower
        tried(2, 1.1, round=0, shape=1),
    )
    asks = beam.next(first, 5)
    assert asked(asks) == [("optimise", (0,)), ("optimise", (2,)), ("generate", ())]
    assert asks[2].unlike == (0, 2)
    assert asks[2].draw == 5


def test_a_beam_mends_once_and_leaves_what_brings_nothing() -> None:
    beam = Beam(2)
    history = [tried(0, 1.5, round=0), tried(1, BROKEN, round=0, shape=1)]
    assert asked(beam.next(history, 9)) == [("repair", (1,)), ("optimise", (0,))]
    history += [tried(2, BROKEN, "repair", (1,), round=1, shape=1), tried(3, None, round=1)]
    asks = beam.next(history, 9)
    assert asked(asks) == [("generate", ()), ("optimise", (0,))]
    assert asks[0].after == 3
    tired = [
        tried(0, 1.5, round=0),
        tried(1, 1.1, round=0, shape=1),
        tried(2, 1.2, round=0, shape=2),
    ]
    for turn in range(PATIENCE):
        tired.append(tried(3 + turn, 1.4, "optimise", (0,), round=1 + turn))
    assert asked(beam.next(tired, 9)) == [("optimise", (2,)), ("optimise", (1,))]


def islands(history: Sequence[IterationResult], count: int = 2) -> list[set[int]]:
    found = Evolve(4, count, 7).residents(history)
    return [{one.iteration for one in home} for home in found]


def test_islands_send_each_other_their_best() -> None:
    history: list[IterationResult] = []
    for turn in range(MIGRATION):
        at = 2 * turn
        history.append(tried(at, 1.0 + turn, round=turn, island=0))
        history.append(tried(at + 1, 0.5 + turn, round=turn, island=1, shape=1))
    assert islands(history[:-2]) == [{0, 2}, {1, 3}]
    assert islands(history) == [{0, 2, 4, 5}, {1, 3, 5, 4}]


def test_evolution_draws_the_same_from_the_same_seed() -> None:
    history = [tried(n, 1 + n / 10, round=0, shape=n % 5, island=n % 2) for n in range(8)]
    once = Evolve(8, 2, 1).next(history, 8)
    assert once == Evolve(8, 2, 1).next(list(history), 8)
    draws = {Evolve(8, 2, seed).next(history, 8) for seed in range(20)}
    assert len(draws) > 10
    kinds = {ask.kind for asks in draws for ask in asks}
    assert kinds == {"generate", "optimise", "combine"}
    for asks in draws:
        assert [ask.island for ask in asks] == [n % 2 for n in range(8)]
        for ask in asks:
            assert ask.why
            assert all(parent % 2 == ask.island for parent in ask.parents)
            assert len(set(ask.parents)) == {"combine": 2, "optimise": 1}.get(ask.kind, 0)


def test_an_empty_island_begins_anew() -> None:
    history = [tried(0, 1.5, round=0, island=0)]
    asks = Evolve(2, 2, 3).next(history, 8)
    assert {ask.island: ask.kind for ask in asks}[1] == "generate"


OUTCOMES = st.one_of(
    st.none(), st.floats(0.5, 4.0), st.sampled_from([BROKEN, Outcome.COMPILATION_FAILURE])
)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(STRATEGIES)),
    seed=st.integers(0, 99),
    outcomes=st.lists(OUTCOMES, min_size=12, max_size=12),
)
def test_any_strategy_asks_what_can_be_asked(
    name: str, seed: int, outcomes: list[float | Outcome | None]
) -> None:
    """Whatever comes back: never more than are left, parents that exist, the same when asked
    again."""
    strategy = open_strategy(name, seed=seed)
    shapes = random.Random(seed)
    history: list[IterationResult] = []
    number = 0
    while left := len(outcomes) - len(history):
        asks = strategy.next(tuple(history), left)
        assert asks == strategy.next(tuple(history), left)
        assert len(asks) <= left
        if not asks:
            assert name == "single"
            break
        group = []
        for ask in asks:
            parents = [history[parent] for parent in ask.parents]
            assert all(parent.candidate for parent in parents)
            assert all(parent.right for parent in parents) is (ask.kind != "repair") or not parents
            assert bool(parents) is (ask.kind != "generate")
            assert ask.after is None or history[ask.after].failure
            assert all(history[known].right for known in ask.unlike)
            at = len(history) + len(group)
            shape = shapes.randrange(len(SHAPES))
            one = tried(at, outcomes[at], ask.kind, ask.parents, round=number, shape=shape)
            group.append(
                IterationResult(at, number, ask, one.candidate, one.evaluation, one.failure)
            )
        history += group
        number += 1
    assert len(rounds(history)) == number
    now = standing(history)
    assert now.best is best_of(history)
    assert now.broken is None or not now.broken.right


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("hill", {}, "unknown strategy"),
        ("refine", {"width": 2}, "one candidate at a time"),
        ("beam", {"islands": 2}, "has no islands"),
    ],
)
def test_numbers_that_do_not_go_with_a_strategy(
    name: str, numbers: dict[str, int], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        open_strategy(name, **numbers)
