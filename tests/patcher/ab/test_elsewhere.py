"""Other traffic, memory, and several patches at once."""

from __future__ import annotations

from typing import Any

import pytest
from elsewhere_sample import at
from measure_sample import decided, evidence
from report_sample import comparison, elsewhere

from patcher.ab.best_set import Combination, best_set
from patcher.ab.other_workloads import OtherWorkloads, PeakMemory
from patcher.bench import Comparison, UsageError


@pytest.mark.parametrize(
    ("found", "verdict", "reason"),
    [
        (at(0.1), "accept", "no loss above 1 % at 1 other point (lowest end -0.20 %)"),
        (at(-0.6), "accept", "lowest end -0.90 %"),
        (at(-1.5), "reject", "it is slower at batch 64, context 4,096: -1.50 % [-1.80, -1.20]"),
        (at(-0.9), "inconclusive", "a loss of over 1 % cannot be excluded"),
        (at(0.1, pairs=4), "inconclusive", "4 pairs"),
        (at(-5.0, pairs=4), "inconclusive", "4 pairs"),
    ],
)
def test_another_point_must_be_within_the_limit(
    found: OtherWorkloads, verdict: str, reason: str
) -> None:
    decision = decided(**evidence(), other_workloads=found)
    assert decision.verdict == verdict
    assert any(reason in line for line in decision.reasons)


@pytest.mark.parametrize(
    ("after", "verdict"), [(1020, "accept"), (1021, "reject"), (900, "accept")]
)
def test_memory_may_grow_by_two_percent(after: int, verdict: str) -> None:
    memory = PeakMemory(baseline_bytes=1000, patched_bytes=after)
    decision = decided(**evidence(), other_workloads=OtherWorkloads(memory=memory))
    assert decision.verdict == verdict
    assert any("peak memory" in line for line in decision.reasons)


def test_what_is_unknown_elsewhere_turns_nothing_but_an_accept() -> None:
    rejected = evidence(verdict="reject")
    assert decided(**rejected, other_workloads=at(-0.9)).verdict == "reject"
    assert decided(**evidence(), other_workloads=elsewhere()).verdict == "accept"


def ab(gain: float, half: float = 0.2, **changes: Any) -> Comparison:
    return comparison(gain, half, 30, **{"p_value": 1e-6, "confidence_pct": 95.0} | changes)


def combined(**gains: float | Comparison) -> list[Combination]:
    return [
        Combination(
            patches=tuple(name.split("_")),
            comparison=found if isinstance(found, Comparison) else ab(found),
        )
        for name, found in gains.items()
    ]


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        ({"a": 2.0, "b": 1.0, "a_b": 3.0}, ("a", "b")),
        ({"a": 2.0, "b": 1.0, "a_b": 2.1}, ("a",)),  # b adds nothing that can be told
        ({"a": 2.0, "b": 1.0, "a_b": 1.2}, ("a",)),  # together they get in each other's way
        ({"a": 2.0, "b": 2.1, "a_b": 2.2}, ("b",)),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "a_b_c": 3.0, "a_b": 2.0}, ("a", "b", "c")),
    ],
)
def test_the_best_set_is_what_was_measured(gains: dict[str, float], kept: tuple[str, ...]) -> None:
    found = best_set(combined(**gains))
    assert found.patches == kept
    assert not found.missing
    assert found == best_set(combined(**dict(reversed(gains.items())))).model_copy(
        update={"combinations": found.combinations}
    )


def test_a_win_among_many_must_hold_among_all() -> None:
    lucky = ab(1.0, p_value=0.02)
    nothing = ab(0.0, verdict="inconclusive", p_value=0.5)
    assert best_set(combined(a=lucky)).patches == ("a",)
    found = best_set(combined(a=lucky, b=nothing, c=nothing))
    assert found.patches == ()
    assert found.combinations[0].comparison.verdict == "inconclusive"
    assert found.combinations[0].comparison.p_holm == pytest.approx(0.06)
    assert "none of 3 combinations" in found.reason


def test_what_was_not_measured_is_named() -> None:
    assert best_set(combined(a=2.0, b=1.0)).missing == ("a + b together, each accepted alone",)
    assert best_set(combined(a=2.0, a_b=3.0)).missing == ("b alone",)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="no measured combination"):
        best_set([])
    with pytest.raises(UsageError, match="given twice"):
        best_set([*combined(a_b=1.0), *combined(b_a=1.0)])
    with pytest.raises(UsageError, match="names a patch twice"):
        best_set(combined(a_a=1.0))
    with pytest.raises(UsageError, match="without a p-value"):
        best_set(combined(a=ab(1.0, p_value=None)))
