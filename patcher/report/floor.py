"""A step against the floor of its model: the ledger's rows for HTML and Markdown."""

from __future__ import annotations

from patcher.hotspot import Profile, StepLedger
from patcher.report import wording
from patcher.report.markup import code, plain, table
from patcher.report.step import short

ROLE_HEAD = ("Role", "MB", "Floor", "Time", "Gap", "Of floor", "Gap is", "Why")
KERNEL_HEAD = ("Kernel", "Of step", "Time", "Launches", "Faster?", "Fusible?")
NAME_LIMIT = 90
"""Characters of a kernel's name, and of one that it could be fused with."""


def role_rows(ledger: StepLedger) -> list[list[str]]:
    """A row for each role, under `ROLE_HEAD`."""
    return [
        [
            row.title,
            wording.number(row.bytes / 1e6) if row.bytes else "",
            _us(row.floor_ns),
            _us(row.measured_ns),
            _us(row.gap_ns),
            wording.percent(row.sol_pct, 0),
            row.status,
            row.reason,
        ]
        for row in ledger.roles
    ]


def kernel_rows(ledger: StepLedger) -> list[list[str]]:
    """A row for each kernel that is answered, under `KERNEL_HEAD`."""
    rows = []
    for kernel in ledger.kernels:
        beside = ", ".join(wording.clip(short(name), NAME_LIMIT) for name in kernel.neighbours)
        fusible = f"{kernel.fusible}: {kernel.fusible_reason}"
        rows.append(
            [
                wording.clip(short(kernel.name), NAME_LIMIT),
                wording.percent(kernel.share_pct, 1),
                _us(kernel.step_ns),
                wording.count(kernel.launches),
                f"{kernel.faster}: {kernel.faster_reason}",
                f"{fusible}: {beside}" if beside else fusible,
            ]
        )
    return rows


def floor_section(profile: Profile | None) -> str:
    """The section in Markdown, or nothing where there is no ledger."""
    if profile is None or profile.ledger is None:
        return ""
    roles = [[plain(cell) for cell in row] for row in role_rows(profile.ledger)]
    kernels = [
        [code(name, NAME_LIMIT), *(plain(cell) for cell in rest)]
        for name, *rest in kernel_rows(profile.ledger)
    ]
    return "\n\n".join(
        [
            "### A step against the floor",
            plain("; ".join(profile.ledger.sentences()) + "."),
            table(ROLE_HEAD, roles, " rrrrr  "),
            table(KERNEL_HEAD, kernels, " rrr  "),
        ]
    )


def _us(time_ns: float | None) -> str:
    return wording.microseconds(None if time_ns is None else time_ns / 1e3)
