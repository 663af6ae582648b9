"""The report for a pull request: verdict first, short tables, the source folded away."""

from __future__ import annotations

from patcher.report import views, wording
from patcher.report.evidence import elsewhere, person, reconciliation
from patcher.report.floor import floor_section
from patcher.report.markup import code, fence, plain, table
from patcher.report.profiled import hotspots
from patcher.report.receipts import receipt_totals
from patcher.report.record import Report

_TAGS = {
    "ptx": "asm",
    **dict.fromkeys(("cuda", "hip", "sycl"), "cpp"),
    **dict.fromkeys(("triton", "torch", "cutedsl"), "python"),
}
"""How a code block of a language is marked."""


def render_markdown(report: Report) -> str:
    """GitHub Markdown; hostile names cannot leave their cell, open markup or notify a person."""
    parts = [
        _verdict(report),
        person(report),
        _comparison(report),
        elsewhere(report),
        hotspots(report.profile),
        floor_section(report.profile),
        _sweep(report),
        _attempts(report),
        _cost(report),
        _checks(report),
        _quality(report),
        _receipt(report),
        _source(report),
        _environment(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(report: Report) -> str:
    head = views.headline(report)
    gain = (
        f", {wording.signed_percent(head.gain_pct)} tokens per second"
        if head.gain_pct is not None
        else ""
    )
    lines = [f"## {plain(views.title(report))}{gain}", ""]
    what = f"**{plain(report.title)}**, " if report.title != report.model else ""
    of_run = code(report.run_id) if not report.receipts else views.subject(report)
    lines.append(f"{what}{of_run}")
    if head.low_pct is not None and head.high_pct is not None:
        level = f"{head.confidence_pct:.4g} % " if head.confidence_pct is not None else ""
        margin = (
            f", margin {wording.signed_percent(head.margin_pct)}"
            if head.margin_pct is not None
            else ""
        )
        low, high = wording.signed_percent(head.low_pct), wording.signed_percent(head.high_pct)
        lines += ["", f"{level}interval {low} to {high}{margin}."]
    if head.reasons:
        lines += ["", *(f"- {plain(wording.sentence(reason))}" for reason in head.reasons)]
    if report.recorded_conversation:
        note = report.recorded_note or "the language model's replies come from a recording"
        lines += [
            "",
            f"> **Recorded conversation.** {plain(wording.sentence(note))}",
        ]
    missing = [stage.label for stage in views.stages(report) if stage.state == "missing"]
    if missing:
        lines += ["", f"Not reached: {', '.join(missing)}."]
    return "\n".join(lines)


def _comparison(report: Report) -> str:
    if report.throughput is None:
        return ""
    rows = []
    for label, found in (
        ("A/B", report.throughput.comparison),
        ("A/A control", report.throughput.control),
    ):
        if found is None:
            rows.append([label, "not measured", "", "", "", "", ""])
            continue
        low, high = (
            wording.signed_percent(found.gain_low_pct),
            wording.signed_percent(found.gain_high_pct),
        )
        rows.append(
            [
                label,
                wording.signed_percent(found.gain_pct),
                f"{low} to {high}",
                wording.number(found.baseline_tokens_per_s, 4),
                wording.number(found.patched_tokens_per_s, 4),
                wording.count(found.pairs),
                found.verdict,
            ]
        )
    head = ["", "Gain", "Interval", "Baseline tok/s", "Patched tok/s", "Pairs", "Verdict"]
    return "### End to end\n\n" + table(head, rows, " rrrrr") + "\n\n" + reconciliation(report)


def _sweep(report: Report) -> str:
    if report.best is None or not report.best.timings:
        return ""
    baseline = plain(report.best.baseline or "the strongest baseline")
    blocks = [f"### Kernel: {code(report.best.op)} against {baseline}"]
    if failed := report.best.failed_baselines:
        blocks.append(f"Not against {plain(', '.join(failed))}, which failed on this machine.")
    if lower := report.best.lower_grade:
        blocks.append(f"{plain(lower.capitalize())}: {plain(report.best.grade_reason)}.")
    for group in views.sweep_groups(report.best.timings):
        if group.fixed:
            blocks.append(plain(group.fixed))
        rows = [
            [
                row.label,
                wording.microseconds(row.candidate_us),
                wording.microseconds(row.baseline_us),
                wording.times(row.speedup),
                f"{wording.times(row.speedup_low)} to {wording.times(row.speedup_high)}",
                wording.percent(row.sol_pct, 0),
                wording.percent(row.launch_pct, 0),
            ]
            for row in group.rows
        ]
        head = [plain(group.axis), "Candidate", "Baseline", "Speedup", "95 % interval"]
        blocks.append(table([*head, "Speed of light", "Launch floor"], rows, "rrrrrrr"))
    if report.best.geomean_speedup is not None:
        blocks.append(f"Geometric mean {wording.times(report.best.geomean_speedup)}.")
    return "\n\n".join(blocks)


def _attempts(report: Report) -> str:
    rows = [
        [
            str(row.iteration) + (" (best)" if row.best else ""),
            row.phase,
            wording.outcome(row.outcome),
            wording.times(row.speedup),
            plain(wording.clip(row.detail, 160)),
        ]
        for row in views.attempt_rows(report.attempts)
    ]
    if not rows:
        return ""
    ended = report.loop_ended
    why = f"\n\nEnded by {ended.reason.replace('_', ' ')}: {plain(ended.detail)}." if ended else ""
    head = ["#", "Pass", "Outcome", "Speedup", "Detail"]
    notes = [
        f"- Reply {row.iteration}: {plain(wording.clip(said, 300))}"
        for row in views.attempt_rows(report.attempts)
        for said in row.repairs
    ]
    repaired = "\n\n" + "\n".join(notes) if notes else ""
    return "### Iterations\n\n" + table(head, rows, "r  r") + why + repaired


def _cost(report: Report) -> str:
    """Money in three columns, which nobody should have to add up from calls."""
    if report.ledger is None:
        return ""
    rows = table(list(views.COST_HEAD), views.cost_rows(report.ledger), " rrr")
    return f"### Cost\n\n{rows}\n\n{plain(report.ledger.details())}"


def _checks(report: Report) -> str:
    if report.best is None:
        return ""
    failed = report.best.failed_checks
    passed = len(report.best.checks) - len(failed)
    head = f"### Judge: {wording.outcome(report.best.outcome.value)}"
    lines = [f"{passed} of {len(report.best.checks)} checks passed."]
    lines += [
        f"- {plain(check.name)}: {plain(wording.clip(check.detail, 300))}" for check in failed
    ]
    return head + "\n\n" + "\n".join(lines)


def _quality(report: Report) -> str:
    lines = []
    if report.quality:
        word = "passed" if report.quality.passed else "**failed**"
        agreement = wording.percent(report.quality.greedy_agreement_pct)
        reason = plain(wording.sentence(report.quality.reason))
        lines.append(f"Same model: {word}. {reason} Greedy agreement {agreement}.")
    if report.reverted_identical is not None:
        word = (
            "bit-identical to before" if report.reverted_identical else "**not** what it was before"
        )
        lines.append(f"After the revert the greedy output is {word}.")
    return "### Quality\n\n" + "\n".join(lines) if lines else ""


def _receipt(report: Report) -> str:
    if report.receipt is None:
        return ""
    if report.receipts:
        rows = [
            [code(one.patch), wording.count(one.calls), wording.count(one.fallbacks)]
            for one in receipt_totals(report)
        ]
        return "### Receipts\n\n" + table(["Patch", "Ran", "Fell back"], rows, " rr")
    calls, fallbacks = sum(report.receipt.calls.values()), sum(report.receipt.fallbacks.values())
    return (
        f"### Receipt\n\nThe patched kernel ran {wording.count(calls)} times; "
        f"the original ran instead of it {wording.count(fallbacks)} times."
    )


def _source(report: Report) -> str:
    if report.candidate_source is None:
        return ""
    language = report.candidate_language or ""
    tag = _TAGS.get(language, language)
    block = fence(report.candidate_source, tag)
    return f"<details>\n<summary>The candidate's source</summary>\n\n{block}\n\n</details>"


def _environment(report: Report) -> str:
    found = report.environment or (report.throughput.environment if report.throughput else None)
    lines = []
    if found:
        clocks = report.throughput.clocks if report.throughput else found.clocks
        packages = ", ".join(f"{name} {version}" for name, version in found.packages.items())
        lines.append(
            f"{plain(found.device)}; clocks {plain(clocks)}; "
            f"Python {plain(found.python)}; {plain(packages)}"
        )
    if report.throughput and report.throughput.residency:
        lines.append(plain(wording.sentence(report.throughput.residency)))
    if report.commands:
        lines.append(fence("\n".join(report.commands), "sh"))
    return "### Environment and commands\n\n" + "\n\n".join(lines) if lines else ""
