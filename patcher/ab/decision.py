"""From evidence to accept, reject or inconclusive: one pure function, with its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patcher.ab.measurement import Measurement
from patcher.bench import SCHEMA_VERSION, Evaluation, Outcome, Record, Throughput, Window
from patcher.bench.ab.engine_config import words
from patcher.bench.stats.comparison import Verdict
from patcher.integrate import Receipt
from patcher.reconciling.proof import Proof
from patcher.reconciling.reconcile import Reconciliation

STRICTEST: tuple[Verdict, ...] = ("reject", "inconclusive", "accept")
RULE_VERSION = 7
"""3: outlier pairs are winsorised. 4: the order effect is removed, and a GPU at its power cap in
over a quarter of the windows is judged in that state. 5: arms with different flags are inconclusive
unless a trial shows that the patched arm's flags alone are no faster. 6: a changed greedy pick is
explained by errors of gaps between leading logits, not of single logits. 7: and by those at its own
position; errors of the baseline, but for the root mean square, are also those of its sequences one
by one."""


class Decision(Record):
    """The verdict, and the reasons for it."""

    schema_version: int = SCHEMA_VERSION
    rule_version: int = RULE_VERSION
    verdict: Verdict
    reasons: tuple[str, ...]
    gain_pct: float
    gain_low_pct: float
    gain_high_pct: float
    margin_pct: float


def decide(
    measurement: Measurement,
    evaluation: Evaluation,
    reconciliation: Reconciliation | None = None,
    proof: Proof | None = None,
) -> Decision:
    """Accept only what every piece of evidence supports.

    A disqualified patch is rejected however fast it was. A session with a failed control is
    inconclusive. Otherwise the comparison's verdict holds. Losses, or possible losses, at other
    traffic prevent an accept.

    Args:
        evaluation: the judge's evaluation of the kernel.
        reconciliation: if it does not explain the gain, or lacks a patch, that is added to the
            reasons; the verdict stays.
        proof: the comparison of receipts with a profile of the patched run, if there is one.
    """
    throughput, quality = measurement.throughput, measurement.quality
    receipt, others = measurement.receipt, measurement.other_workloads
    comparison = throughput.comparison
    wrong = _disqualified(measurement, evaluation)
    if proof is not None:
        wrong += proof.failures
    if others is not None:
        wrong += others.failures
    void = _void(throughput)
    verdict: Verdict
    if wrong:
        verdict, reasons = "reject", wrong
    elif void:
        verdict, reasons = "inconclusive", void
    else:
        verdict = comparison.verdict
        reasons = [
            f"{comparison.gain_pct:+.2f} % tokens/s "
            f"[{comparison.gain_low_pct:+.2f}, {comparison.gain_high_pct:+.2f}] over "
            f"{comparison.pairs} pairs: {comparison.reason}",
            f"the patched kernel ran {receipt.total_calls:,} times, "
            f"{sum(receipt.fallbacks.values()):,} calls fell back",
            f"same model: {quality.reason}",
            "after the revert the greedy output is bit-identical to before"
            + (", as far as two stock processes repeat it" if comparison.process_pairs else ""),
        ]
        if throughput.patched_arguments:
            flags = words(throughput.patched_arguments)
            reasons.append(f"the patched arm runs with {flags}, which alone is no faster")
        if others is not None and others.unknown:
            verdict = "inconclusive" if verdict == "accept" else verdict
            reasons += others.unknown
        elif others is not None:
            reasons.append(f"elsewhere: {others.said}")
        if reconciliation is not None and reconciliation.explained is False:
            reasons.append(f"micro and measured gain do not agree: {reconciliation.said}")
        elif reconciliation is not None and reconciliation.left_out:
            missing = "; ".join(reconciliation.left_out)
            reasons.append(f"micro gains leave out {missing}")
    return Decision(
        verdict=verdict,
        reasons=tuple(reasons),
        gain_pct=comparison.gain_pct,
        gain_low_pct=comparison.gain_low_pct,
        gain_high_pct=comparison.gain_high_pct,
        margin_pct=comparison.margin_pct,
    )


def strictest(decisions: Mapping[str, Decision]) -> Decision:
    """The strictest decision on patches that were installed together, by id. Reasons that do not
    apply to every patch name theirs.
    """
    found = min(decisions.values(), key=lambda one: STRICTEST.index(one.verdict))
    if len(decisions) == 1:
        return found
    shared = set.intersection(*(set(one.reasons) for one in decisions.values()))
    reasons = [reason for reason in found.reasons if reason in shared]
    for patch, one in decisions.items():
        if one.verdict == found.verdict:
            reasons += [f"{reason} ({patch})" for reason in one.reasons if reason not in shared]
    return found.model_copy(update={"reasons": tuple(reasons)})


def _disqualified(measurement: Measurement, evaluation: Evaluation) -> list[str]:
    receipt, quality_receipt = measurement.receipt, measurement.quality_receipt
    found = []
    if evaluation.outcome is not Outcome.CORRECT:
        found.append(f"the judge's outcome is {evaluation.outcome}, not correct")
    if receipt.total_calls == 0:
        found.append("the receipt shows that the patched kernel never ran in the patched windows")
    elif quality_receipt.total_calls == 0:
        found.append(
            "the patched kernel never ran in the quality run, so another model was compared"
        )
    else:
        found += _never_compared(receipt, quality_receipt)
    found += _where_it_ran(measurement.throughput.windows)
    if not measurement.quality.passed:
        found.append(f"it is no longer the same model: {measurement.quality.reason}")
    if not measurement.reverted_identical:
        found.append("after the revert the greedy output differs from before")
    return found


def _never_compared(timed: Receipt, compared: Receipt) -> list[str]:
    """Kernels and shape buckets that were timed, but are not in the quality run. A graph's replays
    run other code than an eager call of the same shape.
    """
    found = []
    if missed := sorted(timed.calls.keys() - compared.calls.keys()):
        found.append(f"the quality run never ran what was timed: {', '.join(missed)}")
    eager = compared.calls.keys() - compared.replayed.keys()
    if missed := sorted(timed.replayed.keys() & eager):
        found.append(
            f"timed in CUDA graphs, in the quality run only outside of them: {', '.join(missed)}"
        )
    return found


def _where_it_ran(windows: Sequence[Window]) -> list[str]:
    """The patched kernel must run in every patched window and in no other."""
    found = []
    strayed = silent = 0
    for window in windows:
        patched = window.kind == "ab" and window.arm == "patched"
        strayed += not patched and bool(window.kernel_calls)
        silent += patched and window.kernel_calls == 0
    if strayed:
        found.append(f"the patched kernel ran in {strayed} windows of the baseline")
    if silent:
        found.append(f"the patched kernel did not run in {silent} patched windows")
    return found


def _void(throughput: Throughput) -> list[str]:
    """Why the session is inconclusive: the A/A control must show no gain, and the patched arm's
    flags must not count as the patch's gain.
    """
    if (own := throughput.patched_arguments) and not _only_for_the_patch(throughput):
        return [
            f"the patched arm runs with {words(own)}, and no trial shows that this alone is no "
            "faster than the baseline: see `patcher throughput compare --tune-baseline`"
        ]
    control = throughput.control
    if control is None or control.pairs < 2:
        return ["the session has no A/A control"]
    margin = throughput.comparison.margin_pct
    if control.gain_low_pct > margin or control.gain_high_pct < -margin:
        return [
            f"the A/A control of the session shows {control.figures}, though both sides are the "
            "same program"
        ]
    return []


def _only_for_the_patch(throughput: Throughput) -> bool:
    """Whether the patched arm's own flags are no faster than the baseline, without any patch."""
    tuning = throughput.tuning
    own = throughput.patched_arguments
    return tuning is not None and tuning.no_faster({**tuning.chosen, **own})
