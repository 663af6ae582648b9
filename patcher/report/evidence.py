"""Reconciliation, other traffic, sets of patches and human verdicts in Markdown."""

from __future__ import annotations

from patcher.report import wording
from patcher.report.markup import code, plain, table
from patcher.report.record import Report

_MOST = 16


def person(report: Report) -> str:
    """Human verdicts, besides the verdict of the rule."""
    return "\n".join(
        f"> **{wording.moment(word.time)}:** {plain(wording.sentence(word.told))}"
        for word in report.words
    )


def reconciliation(report: Report) -> str:
    """The table of expected savings in a step, their sum, and the measured saving."""
    found = report.reconciliation
    if found is None:
        return "Kernel gain and end-to-end gain were not reconciled."
    rows = [
        [
            code(row.name, 80),
            plain(row.shape),
            wording.count(row.launches),
            wording.microseconds(row.saved_us),
            _span(row.low_us, row.high_us),
            plain(("" if row.counted else "not in the sum; ") + row.note),
        ]
        for row in found.rows[:_MOST]
    ]
    left = len(found.rows) - len(rows)
    if found.expected_us is not None:
        span = _span(found.expected_low_us, found.expected_high_us)
        note = wording.signed_percent(found.expected_pct)
        rows.append(["**expected**", "", "", wording.microseconds(found.expected_us), span, note])
    span = _span(found.measured_low_us, found.measured_high_us)
    note = wording.signed_percent(found.measured_pct)
    rows.append(["**measured**", "", "", wording.microseconds(found.measured_us), span, note])
    head = ["Saved in one step", "Shape", "Launches", "Saved", "95 % interval", "Note"]
    parts = [f"**{plain(wording.sentence(found.said))}**", table(head, rows, "  rrr")]
    if left > 0:
        parts.append(f"{left} more rows are in the JSON.")
    if said := [*(f"not in the sum: {each}" for each in found.left_out), *found.caveats]:
        parts.append("\n".join(f"- {plain(each)}" for each in said))
    return "### Does the kernel's own gain explain it?\n\n" + "\n\n".join(parts)


def elsewhere(report: Report) -> str:
    """Other batch sizes and context lengths, memory, and several patches."""
    parts = []
    found = report.elsewhere
    if found is not None:
        words = found.failures + found.unknown or [found.said]
        parts += ["### Other workloads", "\n".join(f"- {plain(word)}" for word in words)]
        rows = [
            [
                wording.count(point.batch),
                wording.count(point.context),
                wording.signed_percent(point.comparison.gain_pct),
                wording.interval(point.comparison.gain_low_pct, point.comparison.gain_high_pct),
                found.standing(point),
            ]
            for point in found.points
        ]
        if rows:
            parts.append(table(["Batch", "Context", "Gain", "Interval", "Result"], rows, "rrrr"))
    sets = report.best_set
    if sets is not None:
        rows = [
            [
                plain(" + ".join(one.patches)),
                wording.signed_percent(one.comparison.gain_pct),
                wording.interval(one.comparison.gain_low_pct, one.comparison.gain_high_pct),
                one.comparison.verdict,
            ]
            for one in sets.combinations
        ]
        head = ["Patches", "Gain", "Interval", "Among all"]
        parts += ["### Combinations of patches", plain(wording.sentence(sets.reason))]
        parts.append(table(head, rows, " rr"))
        if sets.missing:
            parts.append(f"Not measured: {plain('; '.join(sets.missing))}.")
    return "\n\n".join(parts)


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{wording.microseconds(low)} to {wording.microseconds(high)}"
