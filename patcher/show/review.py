"""What a reviewer looks at: the diff, the checks, the intervals, what was said."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from rich.syntax import Syntax
from rich.text import Text

from patcher.ab.measurement import Measurement
from patcher.bench import SCHEMA_VERSION, Quality, Throughput
from patcher.reconciling.reconcile import Reconciliation
from patcher.runs.run import Run
from patcher.show.comparison import comparison_lines, decision_lines
from patcher.show.evaluation import evaluation_table
from patcher.show.quality import quality_lines
from patcher.verdicts.human_verdict import HumanVerdict
from patcher.verdicts.review import Subject
from patcher.visible import visible


def diff_of(subject: Subject) -> str:
    """The functions that the patch stands in for, out; its source, in: a unified diff of both."""
    if subject.bundle is None:
        return ""
    manifest = subject.bundle.manifest
    parts = []
    for part in manifest.target.replaced:
        was = (part.text or f"# {part.name}: too long to be kept, sha256 {part.digest}").split("\n")
        parts += [f"--- {part.name} ({manifest.target.engine} {manifest.target.made_with})"]
        parts += [f" {line}" for line in was]
    added = difflib.unified_diff(
        [], subject.source.splitlines(), "/dev/null", manifest.source, lineterm=""
    )
    return "\n".join([*parts, *added])


def review_document(subject: Subject, said: Sequence[HumanVerdict]) -> dict[str, Any]:
    """All of it for a machine."""
    measured, reconciliation = _measured(subject)
    throughput = measured.throughput if measured else None
    control = throughput.control if throughput else None
    bundle = subject.bundle
    return {
        "schema_version": SCHEMA_VERSION,
        "run": subject.run.name if subject.run else None,
        "patch": bundle.manifest.id if bundle else None,
        "digest": bundle.digest if bundle else None,
        "diff": diff_of(subject),
        "checks": [one.model_dump(mode="json") for one in _checks(subject)],
        "timings": [one.model_dump(mode="json") for one in _timings(subject)],
        "comparison": throughput.comparison.model_dump(mode="json") if throughput else None,
        "control": control.model_dump(mode="json") if control else None,
        "quality": measured.quality.model_dump(mode="json") if measured else None,
        "reconciliation": reconciliation.model_dump(mode="json") if reconciliation else None,
        "decision": subject.decision.model_dump(mode="json") if subject.decision else None,
        "words": [{**one.model_dump(mode="json"), "overrules": one.overrules} for one in said],
    }


def review_lines(subject: Subject, said: Sequence[HumanVerdict]) -> list[Any]:
    """All of it for a person; what a model wrote is shown, never obeyed."""
    measured, reconciliation = _measured(subject)
    shown: list[Any] = [Text(subject.name, style="bold")]
    if diff := diff_of(subject):
        shown.append(Syntax(visible(diff), "diff", word_wrap=True))
    for check in _checks(subject):
        mark = Text("ok   " if check.passed else "fail ", style="green" if check.passed else "red")
        shown.append(mark + Text(f"{check.name}: {visible(check.detail)}"))
    if subject.evaluation is not None:
        shown.append(evaluation_table(subject.evaluation))
    if measured is not None:
        shown += _figures(measured.throughput, measured.quality)
    if reconciliation is not None:
        shown.append(Text(f"kernel gain against end-to-end gain: {reconciliation.said}"))
    if subject.decision is not None:
        shown += decision_lines(subject.decision, "the rule")
    else:
        shown.append(Text("the rule: no decision yet", style="bold"))
    shown += [Text(f"{one.time}: {one.told}") for one in said]
    if not said:
        shown.append(Text("no person has decided yet: patcher accept, patcher reject"))
    return shown


def _measured(subject: Subject) -> tuple[Measurement | None, Reconciliation | None]:
    if subject.run is None:
        return None, None
    run = Run.open(subject.run, read_only=True)
    return (
        run.load("measure", Measurement) if run.done("measure") else None,
        run.load("reconcile", Reconciliation) if run.done("reconcile") else None,
    )


def _figures(throughput: Throughput, quality: Quality) -> list[Any]:
    shown = [comparison_lines("A/B", throughput.comparison)]
    if throughput.control is not None:
        shown.append(comparison_lines("A/A control", throughput.control))
    return [*shown, *quality_lines(quality)]


def _checks(subject: Subject) -> tuple[Any, ...]:
    return subject.evaluation.checks if subject.evaluation else ()


def _timings(subject: Subject) -> tuple[Any, ...]:
    return subject.evaluation.timings if subject.evaluation else ()
