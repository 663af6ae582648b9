"""From evidence to accept, reject or inconclusive: one pure function, with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from patcher.bench import SCHEMA_VERSION, Evaluation, Outcome, Quality, Record, Throughput, Window
from patcher.bench.ab.engine_config import words
from patcher.bench.stats.comparison import Verdict

if TYPE_CHECKING:
    from patcher.ab.other_workloads import OtherWorkloads
    from patcher.reconciling.proof import Proof
    from patcher.reconciling.reconcile import Reconciliation

RULE_VERSION = 5
"""3: pairs far out count as if less far; 4: what beginning a pair does is taken out, and a GPU at
its power cap in over a quarter of the windows is judged in that state; 5: arms that differ in flags
tell nothing unless a trial shows the patched arm's by themselves to be no faster."""


class PatchCalls(Protocol):
    """What the rule reads of `integrate.Receipt`."""

    @property
    def calls(self) -> dict[str, int]: ...
    @property
    def replayed(self) -> dict[str, int]: ...
    @property
    def fallbacks(self) -> dict[str, int]: ...
    @property
    def total_calls(self) -> int: ...


class Decision(Record):
    """The rule's word, and why."""

    schema_version: int = SCHEMA_VERSION
    rule_version: int = RULE_VERSION
    verdict: Verdict
    reasons: tuple[str, ...]
    gain_pct: float
    gain_low_pct: float
    gain_high_pct: float
    margin_pct: float


def decide(
    throughput: Throughput,
    quality: Quality,
    evaluation: Evaluation,
    receipt: PatchCalls,
    quality_receipt: PatchCalls,
    reverted_identical: bool,
    proof: Proof | None = None,
    reconciliation: Reconciliation | None = None,
    elsewhere: OtherWorkloads | None = None,
) -> Decision:
    """Accept only what every piece of evidence supports.

    A disqualified patch is rejected however fast it was; a sitting whose own control fails tells
    nothing; otherwise the comparison's verdict stands. Where the patched run was profiled, too,
    `proof` holds its receipts against that. What was measured at other traffic takes an accept back
    where it was worse, or may have been. A gain that `reconciliation` does not explain is a reason
    beside the verdict and never turns it.
    """
    comparison = throughput.comparison
    wrong = _disqualified(
        throughput, evaluation, quality, receipt, quality_receipt, reverted_identical
    )
    if proof is not None:
        wrong += proof.failures
    if elsewhere is not None:
        wrong += elsewhere.failures
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
            told = words(throughput.patched_arguments)
            reasons.append(f"the patched arm runs with {told}, by itself no faster than the other")
        if elsewhere is not None and elsewhere.unknown:
            verdict = "inconclusive" if verdict == "accept" else verdict
            reasons += elsewhere.unknown
        elif elsewhere is not None:
            reasons.append(f"elsewhere: {elsewhere.said}")
        if reconciliation is not None and reconciliation.explained is False:
            reasons.append(f"micro and measured gain do not agree: {reconciliation.said}")
    return Decision(
        verdict=verdict,
        reasons=tuple(reasons),
        gain_pct=comparison.gain_pct,
        gain_low_pct=comparison.gain_low_pct,
        gain_high_pct=comparison.gain_high_pct,
        margin_pct=comparison.margin_pct,
    )


def _disqualified(
    throughput: Throughput,
    evaluation: Evaluation,
    quality: Quality,
    receipt: PatchCalls,
    quality_receipt: PatchCalls,
    reverted_identical: bool,
) -> list[str]:
    found = []
    if evaluation.outcome is not Outcome.CORRECT:
        found.append(f"the judge's outcome is {evaluation.outcome}, not correct")
    if receipt.total_calls == 0:
        found.append("the receipt shows that the patched kernel never ran in the patched windows")
    elif quality_receipt.total_calls == 0:
        found.append("the patched kernel never ran in the quality run: another model was compared")
    else:
        found += _never_compared(receipt, quality_receipt)
    found += _where_it_ran(throughput.windows)
    if not quality.passed:
        found.append(f"it is no longer the same model: {quality.reason}")
    if not reverted_identical:
        found.append("after the revert the greedy output is not what it was before")
    return found


def _never_compared(timed: PatchCalls, compared: PatchCalls) -> list[str]:
    """Kernels and shape buckets that were timed and are not in the quality run; a graph's replays
    are other code than an eager call of the same shape.
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
    """The patched kernel belongs in patched windows, all of them and no others."""
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
    """Why the sitting tells nothing: both sides of the control are the same program, and what is
    not the patch's must not be booked as its gain.
    """
    if (own := throughput.patched_arguments) and not _only_for_the_patch(throughput):
        return [
            f"the patched arm runs with {words(own)}, and no trial shows that this is no faster by "
            "itself than the baseline: see --tune-baseline"
        ]
    control = throughput.control
    if control is None or control.pairs < 2:
        return ["no A/A control in the sitting"]
    margin = throughput.comparison.margin_pct
    if control.gain_low_pct > margin or control.gain_high_pct < -margin:
        return [
            f"the A/A control of the same sitting shows {control.figures} where there is nothing: "
            "nothing can be told"
        ]
    return []


def _only_for_the_patch(throughput: Throughput) -> bool:
    """Whether the patched arm's own flags are no faster than the baseline, without any patch."""
    tuning = throughput.tuning
    own = throughput.patched_arguments
    return tuning is not None and tuning.no_faster({**tuning.chosen, **own})
