"""`patcher export`, `patcher import`: kernels in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples(
    "patcher export norm-patch --to hf-kernels --out fused-add-rms-norm --license apache-2.0",
    "patcher export norm-patch --to flashinfer --out norm-dataset",
)
def export(
    patch: Annotated[Path, typer.Argument(help="A patch bundle.")],
    to: Annotated[str, typer.Option("--to", help="hf-kernels or flashinfer.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder, or an earlier export.")],
    sweep: Annotated[
        str | None,
        typer.Option(help="flashinfer: the sweep of the evidence, where it is ambiguous."),
    ] = None,
    license: Annotated[
        str, typer.Option(help="hf-kernels: license of the source, as the Hub spells it.")
    ] = "unknown",
    as_json: Json = False,
) -> int:
    """Write a patch as a Hugging Face kernel repository or a flashinfer-bench dataset.

    Prints what the format cannot express.
    """
    from patcher.integrate import Patch, export_patch, unpacked

    with unpacked(patch) as folder:
        done = export_patch(Patch.load(folder), to, out, sweep=sweep, license=license)
    build = f", build {done.variant}" if done.variant else ""
    lines = [f"{out}: {len(done.files)} files{build}"]
    lines += [f"  not in it: {each}" for each in done.left_out]
    Output(as_json).emit(done, *(Text(line) for line in lines))
    return 0


@app.command("import")
@examples(
    "patcher import norm-dataset --out imported",
    "PATCHER_OPS=imported patcher evaluate OP imported/OP/solutions/NAME/OP.py",
)
def import_(
    path: Annotated[Path, typer.Argument(help="An export, a dataset, or a Definition's file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the ops.")] = Path("imported"),
    as_json: Json = False,
) -> int:
    """Read an export or a flashinfer-bench dataset as sources, and as ops where they are new.

    Runs nothing of it, and reports everything that it leaves out.
    """
    from patcher.integrate import import_kernel

    done = import_kernel(path, out)
    lines = [f"{out / name}  {digest[:12]}" for name, digest in done.sources.items()]
    lines += [f"{out / name}: a new op" for name in done.ops]
    lines += [f"  note: {each}" for each in done.notes]
    lines += [f"  refused: {name}: {reason}" for name, reason in done.refused.items()]
    Output(as_json).emit(done, *(Text(line) for line in lines))
    return 0
