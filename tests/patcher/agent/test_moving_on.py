"""When the loop leaves an op, and what the analyst is told of its expectations."""

from __future__ import annotations

import pytest
from tried_sample import judged, tried

from patcher.agent import MAX_FUNCTIONAL_FAILURES, StopRules
from patcher.agent.stopping import left_pct, reason_to_stop
from patcher.attempts import Attempt, Recommendation
from patcher.attempts.history import IterationResult
from patcher.bench import Outcome
from patcher.models import Usage
from patcher.prompting.expectations import expectations, verdict

BROKEN = Outcome.RUNTIME_ERROR


def reason(history: list[IterationResult], **rules: float) -> str | None:
    found = reason_to_stop(history, StopRules.model_validate(rules))
    assert found is None or found.detail
    return found.reason if found else None


def test_at_a_share_of_the_speed_of_light() -> None:
    assert reason([tried(0, 2.0, sol_pct=89)]) is None
    assert reason([tried(0, 2.0, sol_pct=91)]) == "speed_of_light"
    assert reason([tried(0, 2.0, sol_pct=91)], sol_pct=95) is None
    # slower than the baseline at the speed of light: there is nothing to gain either
    assert reason([tried(0, 0.9, sol_pct=99)]) == "speed_of_light"
    # it is the best that counts
    assert reason([tried(0, 3.0, sol_pct=50), tried(1, 2.0, "optimise", sol_pct=95)]) is None


def test_the_share_is_known_only_when_every_points_is() -> None:
    one = judged(2.0, sol_pct=50).timings[0]
    two = one.model_copy(update={"sol_pct": None})
    three = one.model_copy(update={"sol_pct": 400.0})
    evaluation = judged(2.0)
    assert evaluation.model_copy(update={"timings": (one, two)}).sol_share is None
    # a share above all means a ceiling that was measured too low
    both = evaluation.model_copy(update={"timings": (one, three)})
    assert both.sol_share == pytest.approx(0.5**0.5)


def test_after_reverts_in_a_row() -> None:
    history = [tried(0, 2.0)]
    for at in range(1, 5):
        history.append(tried(at, 1.5 if at % 2 else BROKEN, "optimise", (0,)))
    assert reason(history) is None
    assert reason([*history, tried(5, 1.0, "optimise", (0,))]) == "reverts"
    assert reason([*history, tried(5, 2.1, "optimise", (0,))]) is None
    assert reason(history, patience=4) == "reverts"
    # a repair that betters the best makes up for the pass that broke
    mended = [*history, tried(5, BROKEN, "optimise", (0,)), tried(6, 2.5, "repair", (5,))]
    assert reason(mended) is None
    # a round is one, however many it asked for
    wide = [tried(0, 2.0), *(tried(n, 1.0, "optimise", (0,), round=1) for n in range(1, 9))]
    assert reason(wide) is None


def test_at_the_ops_end_to_end_ceiling() -> None:
    # 10 % of the time at 2 x: the 5 % that are left are worth more than the margin
    assert reason([tried(0, 2.0)], share_pct=10, margin_pct=0.5) is None
    assert reason([tried(0, 2.0)], share_pct=0.9, margin_pct=0.5) == "end_to_end_ceiling"
    assert reason([tried(0, 30.0)], share_pct=10, margin_pct=0.5) == "end_to_end_ceiling"
    # 80 % of the speed of light: a fifth of the 5 % is left
    history = [tried(0, 2.0, sol_pct=80)]
    assert reason(history, share_pct=10, margin_pct=0.9) is None
    assert reason(history, share_pct=10, margin_pct=1.2) == "end_to_end_ceiling"
    # never before something is right
    assert reason([tried(0, BROKEN)], share_pct=0.1) is None


def test_amdahls_law() -> None:
    assert left_pct(0.5, 1.0, 0.0) == pytest.approx(100)
    assert left_pct(0.5, 1.0, 1.0) == 0
    assert left_pct(0.1, 2.0, 0.5) == pytest.approx(100 * (0.95 / 0.925 - 1))
    assert left_pct(1.0, 4.0, 0.0) == float("inf")


def test_after_functional_rounds_that_failed() -> None:
    history = [tried(n, BROKEN) for n in range(MAX_FUNCTIONAL_FAILURES)]
    assert reason(history[:-1]) is None
    assert reason(history) == "functional_failures"
    sampled = [tried(n, BROKEN, round=0) for n in range(20)]
    assert reason(sampled) is None


def attempt(
    iteration: int,
    speedup: float | None,
    expected: float | None = None,
    parents: tuple[int, ...] = (),
) -> Attempt:
    advice = Recommendation(bottleneck="b", change=f"change {iteration}", expected_speedup=expected)
    return Attempt(
        iteration=iteration,
        phase="optimisation" if expected else "functional",
        parents=parents,
        digest="0",
        outcome=Outcome.CORRECT if speedup else BROKEN,
        geomean_speedup=speedup,
        detail="",
        usage=Usage(),
        model="m",
        reply_source="recorded",
        recommendation=advice if expected else None,
    )


def test_expectations_are_held_against_the_next_evaluation_or_its_repair() -> None:
    attempts = [
        attempt(0, 1.0),
        attempt(1, 1.5, 2.0, (0,)),
        attempt(2, None, 3.0, (1,)),
        attempt(3, None, None, (2,)),
        attempt(4, 1.8, None, (3,)),
        attempt(5, None, 4.0, (4,)),
    ]
    found = expectations(attempts)
    assert [(one.iteration, one.before, one.expected, one.measured) for one in found] == [
        (1, 1.0, 2.0, 1.5),
        (2, 1.5, 3.0, 1.8),
        (5, 1.8, 4.0, None),
    ]
    assert [one.off_pct for one in found] == [pytest.approx(-25), pytest.approx(-40), None]
    said = verdict(found)
    assert "1 of 3 changes never gave a right kernel" in said
    assert "67 % of the expected speedup was measured: expectations are too high" in said
    assert verdict([]) == ""
    assert "expectations hold" in verdict(expectations([attempt(0, 1.0), attempt(1, 2.0, 2.0)]))
