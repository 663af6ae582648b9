"""The rule: where the kernel ran, what the control says, and that it is one pure function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatch_sample import Graph, made, tensors
from measure_sample import comparison, decided, evidence

from patcher.ab.decision import Decision
from patcher.bench import Outcome, Window
from patcher.integrate import Receipt
from patcher.integrate.counts import GraphWatch
from patcher.reconciling.proof import Proof


def window(kind: Any, arm: Any, calls: int | None) -> Window:
    return Window(pair=0, arm=arm, kind=kind, tokens=1, decode_s=1, prefill_s=1, kernel_calls=calls)


def with_throughput(**update: Any) -> dict[str, Any]:
    given = evidence()
    return given | {"throughput": given["throughput"].model_copy(update=update)}


def receipt(*shapes: str) -> Receipt:
    return Receipt(
        patch_id="p", digest="d", pid=1, calls=dict.fromkeys(shapes, 3), fallbacks={"dtype": 2}
    )


CLEAN = (
    window("ab", "baseline", 0),
    window("ab", "patched", 9),
    window("aa", "baseline", 0),
    window("aa", "patched", 0),
)


@pytest.mark.parametrize(
    ("windows", "verdict", "reason"),
    [
        (CLEAN, "accept", "+3.00 %"),
        ((*CLEAN, window("ab", "baseline", 1)), "reject", "ran in 1 windows of the baseline"),
        ((*CLEAN, window("aa", "patched", 1)), "reject", "ran in 1 windows of the baseline"),
        ((*CLEAN, window("ab", "patched", 0)), "reject", "did not run in 1 patched windows"),
        ((window("ab", "patched", None),), "accept", "+3.00 %"),
    ],
)
def test_the_kernel_belongs_in_the_patched_windows(
    windows: tuple[Window, ...], verdict: str, reason: str
) -> None:
    decision = decided(**with_throughput(windows=windows))
    assert decision.verdict == verdict
    assert any(reason in line for line in decision.reasons)


def test_what_was_timed_must_have_been_compared() -> None:
    timed = receipt("op tokens=8", "op tokens=256")
    missed = decided(**evidence(receipt=timed, quality_receipt=receipt("op tokens=256")))
    assert missed.verdict == "reject"
    assert any("never ran what was timed: op tokens=8" in line for line in missed.reasons)
    more = receipt("op tokens=8", "op tokens=256", "op tokens=1")
    assert decided(**evidence(receipt=timed, quality_receipt=more)).verdict == "accept"


def test_what_was_timed_in_graphs_must_have_been_compared_in_graphs() -> None:
    eager = receipt("op tokens=8", "op tokens=256")
    timed = eager.model_copy(update={"replayed": {"op tokens=8": 3}})
    missed = decided(**evidence(receipt=timed, quality_receipt=eager))
    assert missed.verdict == "reject"
    [reason] = missed.reasons
    assert reason.startswith("timed in CUDA graphs")
    assert reason.endswith("only outside of them: op tokens=8")
    assert decided(**evidence(receipt=timed, quality_receipt=timed)).verdict == "accept"
    assert decided(**evidence(receipt=eager, quality_receipt=timed)).verdict == "accept"


@torch.inference_mode()
def test_receipts_of_graphs_cover_what_graphs_replayed() -> None:
    """The counters themselves: real dispatch by shape bucket, a double for the graphs alone."""

    def ran(rows: int, *, graph: bool) -> Receipt:
        dispatch = made()
        with GraphWatch([dispatch.book], Graph):
            one = Graph()
            if graph:
                one.capture_begin()
            dispatch(*tensors(rows), 1e-5)
            if graph:
                one.capture_end()
                one.replay()
        return Receipt.of(dispatch.book)

    recorded = ran(300, graph=True)
    bucket = "op tokens=<=512 hidden=8 float32"
    assert recorded.calls == recorded.replayed == {bucket: 1}
    same_bucket = decided(**evidence(receipt=recorded, quality_receipt=ran(400, graph=True)))
    assert same_bucket.verdict == "accept"
    eager = decided(**evidence(receipt=recorded, quality_receipt=ran(300, graph=False)))
    assert any(bucket in line and "CUDA graphs" in line for line in eager.reasons)
    other = decided(**evidence(receipt=recorded, quality_receipt=ran(8, graph=True)))
    assert any(bucket in line and "never ran what was timed" in line for line in other.reasons)
    assert {eager.verdict, other.verdict} == {"reject"}


@pytest.mark.parametrize(
    ("gain", "pairs", "verdict"),
    [
        (1.0, 4, "inconclusive"),
        (-1.0, 4, "inconclusive"),
        (0.6, 20, "accept"),
        (0.0, 1, "inconclusive"),
    ],
)
def test_a_control_that_shows_a_difference_voids_the_session(
    gain: float, pairs: int, verdict: str
) -> None:
    control = comparison("inconclusive", gain).model_copy(update={"pairs": pairs})
    assert decided(**evidence(control=control)).verdict == verdict


def test_a_disqualified_patch_stays_rejected_whatever_the_control_says() -> None:
    control = comparison("accept", 2.0)
    decision = decided(**evidence(control=control, same_model=False, reverted_identical=False))
    assert decision.verdict == "reject"
    assert len(decision.reasons) == 2


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome != "correct"])
def test_no_other_outcome_of_the_judge_is_accepted(outcome: Outcome) -> None:
    given = evidence()
    other = given["evaluation"].model_copy(update={"outcome": outcome})
    assert decided(**given | {"evaluation": other}).verdict == "reject"


def test_a_profile_that_does_not_show_the_claim_rejects() -> None:
    proof = Proof(
        patch_id="p",
        digest="d",
        profile="nsys export",
        steps=None,
        expected_per_step=None,
        rows=(),
        problems=("the profile has no kernel called x",),
    )
    arguments = with_throughput()
    assert decided(**arguments).verdict == "accept"
    decision = decided(**arguments, proof=proof)
    assert decision.verdict == "reject"
    assert decision.reasons == proof.problems
    shown = proof.model_copy(update={"problems": ()})
    assert decided(**arguments, proof=shown).verdict == "accept"


def test_the_decision_is_a_pure_record() -> None:
    first, second = decided(**evidence()), decided(**evidence())
    assert first == second
    assert Decision.model_validate_json(first.model_dump_json()) == first
    assert (first.gain_pct, first.margin_pct) == (3.0, 0.5)
