"""`patcher doctor`, `ops`: this machine and the kernel library, as they are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, load_op, load_ops
from patcher.commands.console import Json, Output, app, examples

ops_app = typer.Typer(help="The kernel library.", invoke_without_command=True)
app.add_typer(ops_app, name="ops")


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


@ops_app.callback()
def ops(context: typer.Context, as_json: Json = False) -> None:
    """The kernel library: contracts, baselines, solutions, patch points."""
    from patcher.show.ops import ops_table

    if context.invoked_subcommand is None:
        library = load_ops()
        contracts = [op.contract.model_dump(mode="json") for op in library.values()]
        document = {"schema_version": SCHEMA_VERSION, "ops": contracts}
        Output(as_json).emit(document, ops_table(library))


@ops_app.command("show")
@examples("patcher ops show fused_add_rms_norm")
def ops_show(name: Annotated[str, typer.Argument(help="An op.")], as_json: Json = False) -> int:
    """One op's contract as it is written."""
    op = load_op(name)
    solutions = [{"name": info.name, "summary": info.summary} for info, _ in op.solutions()]
    document = {**op.contract.model_dump(mode="json"), "solutions": solutions}
    Output(as_json).emit(document, Text((op.folder / "op.toml").read_text(encoding="utf-8")))
    return 0
