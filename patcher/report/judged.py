"""The report of patches that were measured outside of a run, one or several together."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.ab.best_set import BestSet
from patcher.ab.result import ABResult
from patcher.bench import Candidate
from patcher.hotspot import Profile
from patcher.integrate import Patch, Receipt
from patcher.report.record import PatchReceipts, ReceiptRow, Report


def report_of(
    judged: ABResult,
    patches: Sequence[Patch],
    created: str,
    commands: tuple[str, ...],
    before: Profile | None = None,
    after: Profile | None = None,
    *,
    best_set: BestSet | None = None,
) -> Report:
    """Everything that a verdict is based on, including evaluation and source from the bundles.

    Args:
        patches: in the order of `judged.patches`.
        created: ISO 8601, UTC.
        before: a profile of the stock engine.
        after: a profile of the patched one.
        best_set: the combinations of which this one was the best.
    """
    measured = judged.measured[0]
    throughput = measured.throughput
    name = " + ".join(judged.patches)
    sources = [patch.candidate() for patch in patches]
    only = patches[0] if len(patches) == 1 else None
    return Report(
        run_id=name,
        created=created,
        title=throughput.workload.model,
        commands=commands,
        model=throughput.workload.model,
        workload=throughput.workload,
        profile=before,
        profile_after=after,
        best=only.evaluation if only else None,
        candidate_source=(
            sources[0].source if only else "\n".join(map(_headed, judged.patches, sources))
        ),
        candidate_language=str(sources[0].language) if only else "several",
        patch_id=name,
        throughput=throughput,
        quality=measured.quality,
        receipt=_together(patches, [one.receipt for one in judged.measured]),
        quality_receipt=_together(patches, [one.quality_receipt for one in judged.measured]),
        receipts=_of_each(patches, judged) if len(patches) > 1 else (),
        reconciliation=judged.reconciliation,
        elsewhere=measured.other_workloads,
        best_set=best_set,
        decision=judged.decision,
        reverted_identical=measured.reverted_identical,
        environment=throughput.environment,
    )


def receipt_of(receipt: Receipt) -> ReceiptRow:
    """What a report shows of it."""
    return ReceiptRow(calls=receipt.calls, fallbacks=receipt.fallbacks)


def _of_each(patches: Sequence[Patch], judged: ABResult) -> tuple[PatchReceipts, ...]:
    return tuple(
        PatchReceipts(
            patch_id=patch.manifest.id,
            op=patch.manifest.op,
            ab=receipt_of(one.receipt),
            quality=receipt_of(one.quality_receipt),
        )
        for patch, one in zip(patches, judged.measured, strict=True)
    )


def _headed(patch_id: str, candidate: Candidate) -> str:
    """Its source, below a line with the patch's id and language."""
    return f"==> {patch_id} ({candidate.language})\n{candidate.source}"


def _together(patches: Sequence[Patch], receipts: Sequence[Receipt]) -> ReceiptRow:
    """The receipt of one patch; for several, counts are prefixed by their op."""
    if len(patches) == 1:
        return receipt_of(receipts[0])
    own = [(patch.manifest.op, each) for patch, each in zip(patches, receipts, strict=True)]
    return ReceiptRow(
        calls={f"{op}: {at}": count for op, each in own for at, count in each.calls.items()},
        fallbacks={f"{op}: {why}": n for op, each in own for why, n in each.fallbacks.items()},
    )
