"""`patcher doctor`: what this machine has for patcher, and what it lacks."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION
from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples("patcher doctor", "patcher doctor --all", "patcher doctor --json")
def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="Also warn of what is for other hardware and engines.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check this machine, and say how to fix what it lacks.

    Warns only about what fits this machine: about CUDA's tools where there is an NVIDIA GPU, for
    example. Exit code 3: something that every command needs is missing.
    """
    from patcher.doctor import examine
    from patcher.show.doctor import findings_table

    found = examine()
    findings = [finding for finding in found if everything or finding.shown]
    lines = []
    if left_out := len(found) - len(findings):
        told = f"{left_out} more warnings are for other hardware and engines: patcher doctor --all"
        lines.append(Text(told, style="dim"))
    Output(as_json).emit(
        {
            "schema_version": SCHEMA_VERSION,
            "findings": [finding.model_dump() for finding in findings],
            "left_out": left_out,
        },
        findings_table(findings),
        *lines,
    )
    return 3 if any(finding.status == "fail" for finding in found) else 0
