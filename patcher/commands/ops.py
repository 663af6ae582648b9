"""`patcher ops`: the kernel library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, Contract, Op, later_points, load_op, load_ops
from patcher.commands.console import Json, Output, app, examples

ops_app = typer.Typer(invoke_without_command=True)
app.add_typer(ops_app, name="ops")


@ops_app.callback()
@examples("patcher ops", "patcher ops --json", "patcher ops show fused_add_rms_norm")
def ops(context: typer.Context, as_json: Json = False) -> None:
    """List the ops of the kernel library: baselines, solutions, patch points."""
    from patcher.show.ops import ops_table

    if context.invoked_subcommand is None:
        library = load_ops()
        contracts = [_whole_contract(op) for op in library.values()]
        ops = [contract.model_dump(mode="json") for contract in contracts]
        document = {"schema_version": SCHEMA_VERSION, "ops": ops}
        Output(as_json).emit(document, ops_table(library, contracts))


@ops_app.command("show")
@examples("patcher ops show fused_add_rms_norm")
def ops_show(name: Annotated[str, typer.Argument(help="An op.")], as_json: Json = False) -> int:
    """Print the contract of one op."""
    op = load_op(name)
    solutions = [{"name": info.name, "summary": info.summary} for info, _ in op.solutions()]
    whole = _whole_contract(op)
    text = (op.folder / "op.toml").read_text(encoding="utf-8")
    others = whole.patch_points[len(op.contract.patch_points) :]
    for title, points in (
        ("that came later", later_points(op.folder)),
        ("of other packages", others),
    ):
        if points:
            lines = [f"#   {each.engine} {each.versions}: {each.point}\n" for each in points]
            text += "".join([f"\n# Patch points {title}:\n", *lines])
    document = {**whole.model_dump(mode="json"), "solutions": solutions}
    Output(as_json).emit(document, Text(text))
    return 0


@ops_app.command("observe")
@examples("patcher ops observe norm.safetensors", "patcher ops observe norm.safetensors --json")
def ops_observe(
    file: Annotated[Path, typer.Argument(help="Calls that `patcher.recorded` wrote.")],
    as_json: Json = False,
) -> int:
    """Compare what an engine was seen to do with an op's contract.

    It shows shapes, strides, dtypes and values, which of them no sweep, hidden shape or regime has,
    and the error of the engine's own outputs against float64.

    Exit code 0: the outputs are the op's; 1: a call refutes the contract.
    """
    from patcher.bench.judge.contract_observation import observe
    from patcher.show.observed import observed_tables

    found = observe(file)
    Output(as_json).emit(found, *observed_tables(found))
    return 1 if found.refuted else 0


def _whole_contract(op: Op) -> Contract:
    """The op's contract with the patch points of other packages after its own."""
    from patcher.integrate import all_specs

    return op.contract.model_copy(update={"patch_points": tuple(all_specs(op))})
