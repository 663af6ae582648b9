"""Receipts in a report: one row per patch."""

from __future__ import annotations

from dataclasses import dataclass

from patcher.report.record import ReceiptRow, Report


@dataclass(frozen=True)
class ReceiptTotals:
    """One patch: calls of its kernel, and calls of the original instead."""

    patch: str
    calls: int
    fallbacks: int
    quality_calls: int | None
    quality_fallbacks: int | None


def receipt_totals(report: Report) -> list[ReceiptTotals]:
    """A row for each patch."""
    if report.receipts:
        return [_totals(one.patch_id, one.ab, one.quality) for one in report.receipts]
    if report.receipt is None:
        return []
    name = report.patch_id or "the patch"
    return [_totals(name, report.receipt, report.quality_receipt)]


def _totals(patch: str, ab: ReceiptRow, quality: ReceiptRow | None) -> ReceiptTotals:
    return ReceiptTotals(
        patch=patch,
        calls=sum(ab.calls.values()),
        fallbacks=sum(ab.fallbacks.values()),
        quality_calls=sum(quality.calls.values()) if quality else None,
        quality_fallbacks=sum(quality.fallbacks.values()) if quality else None,
    )
