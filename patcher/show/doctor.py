"""The findings of `patcher doctor` as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from patcher.finding import Finding

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def findings_table(findings: list[Finding]) -> Table:
    table = Table(title="patcher doctor")
    for name in ("", "what", "finding", "fix"):
        table.add_column(name)
    for finding in findings:
        table.add_row(
            Text(finding.status, style=COLOURS[finding.status]),
            finding.name,
            Text(finding.detail),
            Text(finding.fix),
        )
    return table
