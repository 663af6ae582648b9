"""From evidence to accept, reject or inconclusive: one pure function, with its reasons."""

from __future__ import annotations

from typing import Protocol

from bench import SCHEMA_VERSION, Evaluation, Outcome, Quality, Record, Throughput
from bench.comparison import Verdict

RULE_VERSION = 1


class ReceiptLike(Protocol):
    """What the rule reads of `integrate.Receipt`."""

    @property
    def calls(self) -> dict[str, int]: ...
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
    receipt: ReceiptLike,
    quality_receipt: ReceiptLike,
    reverted_identical: bool,
) -> Decision:
    """Accept only what every piece of evidence supports.

    A disqualified patch is rejected however fast it was; a sitting whose own control fails tells
    nothing; otherwise the comparison's verdict stands.
    """
    comparison = throughput.comparison
    wrong = _disqualified(evaluation, quality, receipt, quality_receipt, reverted_identical)
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
            "after the revert the greedy output is bit-identical to before",
        ]
    return Decision(
        verdict=verdict,
        reasons=tuple(reasons),
        gain_pct=comparison.gain_pct,
        gain_low_pct=comparison.gain_low_pct,
        gain_high_pct=comparison.gain_high_pct,
        margin_pct=comparison.margin_pct,
    )


def _disqualified(
    evaluation: Evaluation,
    quality: Quality,
    receipt: ReceiptLike,
    quality_receipt: ReceiptLike,
    reverted_identical: bool,
) -> list[str]:
    found = []
    if evaluation.outcome is not Outcome.CORRECT:
        found.append(f"the judge's outcome is {evaluation.outcome}, not correct")
    if receipt.total_calls == 0:
        found.append("the receipt shows that the patched kernel never ran in the patched windows")
    elif quality_receipt.total_calls == 0:
        found.append("the patched kernel never ran in the quality run: another model was compared")
    if not quality.passed:
        found.append(f"it is no longer the same model: {quality.reason}")
    if not reverted_identical:
        found.append("after the revert the greedy output is not what it was before")
    return found


def _void(throughput: Throughput) -> list[str]:
    control = throughput.control
    if control is None or control.pairs < 2:
        return ["no A/A control in the sitting"]
    if control.verdict == "accept":
        return [
            "the A/A control of the same sitting shows a gain of "
            f"{control.gain_pct:+.2f} % where there is none: nothing can be told"
        ]
    return []
