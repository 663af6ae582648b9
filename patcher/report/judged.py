"""The report of one patch that was measured by itself, outside of a run."""

from __future__ import annotations

from hotspot import Profile
from integrate import Patch
from integrate import Receipt as FullReceipt
from patcher.endtoend.measured import Judged
from patcher.report.record import Receipt, Report


def report_of(
    judged: Judged,
    patch: Patch,
    created: str,
    commands: tuple[str, ...],
    before: Profile | None = None,
    after: Profile | None = None,
) -> Report:
    """Everything that a verdict rests on, with what the bundle brings: evaluation and source.

    Args:
        created: ISO 8601, UTC.
        before: a profile of the engine as it comes.
        after: of the patched one.
    """
    measured = judged.measured
    throughput = measured.throughput
    candidate = patch.candidate()
    return Report(
        run_id=patch.manifest.id,
        created=created,
        title=throughput.workload.model,
        commands=commands,
        model=throughput.workload.model,
        workload=throughput.workload,
        profile=before.model_dump(mode="json") if before else None,
        profile_after=after.model_dump(mode="json") if after else None,
        best=patch.evaluation,
        candidate_source=candidate.source,
        candidate_language=str(candidate.language),
        patch_id=patch.manifest.id,
        throughput=throughput,
        quality=measured.quality,
        receipt=receipt_of(measured.receipt),
        quality_receipt=receipt_of(measured.quality_receipt),
        reconciliation=judged.reconciliation,
        elsewhere=measured.elsewhere,
        decision=judged.decision,
        reverted_identical=measured.reverted_identical,
        environment=throughput.environment,
    )


def receipt_of(receipt: FullReceipt) -> Receipt:
    """What a report shows of it."""
    return Receipt(calls=receipt.calls, fallbacks=receipt.fallbacks)
