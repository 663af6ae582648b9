"""`patcher doctor`: what this machine has for patcher, and what it lacks."""

from __future__ import annotations

from patcher.bench import SCHEMA_VERSION
from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples("patcher doctor", "patcher doctor --json")
def doctor(as_json: Json = False) -> int:
    """What this machine has for patcher, and the fix for what it lacks."""
    from patcher.doctor import examine
    from patcher.show.doctor import findings_table

    findings = examine()
    Output(as_json).emit(
        {
            "schema_version": SCHEMA_VERSION,
            "findings": [finding.model_dump() for finding in findings],
        },
        findings_table(findings),
    )
    return 3 if any(finding.status == "fail" for finding in findings) else 0
