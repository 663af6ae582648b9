"""`patcher export`, `patcher import`: kernels in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import UsageError
from patcher.commands.console import Json, Output, app, examples
from patcher.visible import one_line


@app.command()
@examples(
    "patcher export norm-patch --to hf-kernels --out fused-add-rms-norm --license apache-2.0",
    "patcher export norm-patch --to flashinfer --out norm-dataset",
    "patcher export kernel.py --to kernelbench --op level2_37_matmul_swish_sum_groupnorm "
    "--problem KernelBench/level2/37_Matmul_Swish_Sum_GroupNorm.py --out model_new.py",
    "patcher export kernel.py --to sol-execbench --op rmsnorm_h4096 --problem L1/rmsnorm_h4096 "
    "--out solution.json",
)
def export(
    patch: Annotated[
        Path, typer.Argument(help="A patch bundle; of a problem: a source of its op.")
    ],
    to: Annotated[
        str, typer.Option("--to", help="hf-kernels, flashinfer, kernelbench or sol-execbench.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="A new folder, or an earlier export; of a problem: a new file."),
    ],
    sweep: Annotated[
        str | None,
        typer.Option(help="flashinfer: the sweep of the evidence, where it is ambiguous."),
    ] = None,
    license: Annotated[
        str, typer.Option(help="hf-kernels: license of the source, as the Hub spells it.")
    ] = "unknown",
    op: Annotated[str | None, typer.Option(help="The op that the problem was imported as.")] = None,
    problem: Annotated[
        Path | None,
        typer.Option(
            help="kernelbench: the problem's file, whose text is copied; sol-execbench: its folder."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a patch as a Hugging Face kernel repository or a flashinfer-bench dataset, or a
    candidate of an imported problem as KernelBench's ModelNew file or SOL-ExecBench's Solution.

    Prints what the format cannot express.
    """
    from patcher.integrate import Patch, export_patch, unpacked

    if to in ("kernelbench", "sol-execbench"):
        from patcher.integrate import write_model_new, write_solution

        if op is None or problem is None:
            raise UsageError(
                "an answer to a problem needs the op and its problem", "add --op OP --problem FILE"
            )
        if to == "kernelbench":
            answer = write_model_new(op, patch, problem, out)
            Output(as_json).emit(answer, Text(f"{out}: a ModelNew of {answer.file}"))
        else:
            solution = write_solution(op, patch, problem, out)
            told = one_line(solution.definition, 200)
            Output(as_json).emit(solution, Text(f"{out}: a Solution of {told}"))
        return 0
    if op is not None or problem is not None:
        raise UsageError(
            "--op and --problem belong to --to kernelbench or sol-execbench", "drop them"
        )

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
    "patcher import KernelBench/level2 --precision fp32 --precision tf32 --out imported",
    "patcher import KernelBench/level2/37_Matmul_Swish_Sum_GroupNorm.py --size batch_size=1024",
    "patcher import SOL-ExecBench/data/benchmark/L1 --out imported",
    "PATCHER_OPS=imported patcher import model_new.py --op OP --out imported",
)
def import_(
    path: Annotated[
        Path,
        typer.Argument(
            help="An export, a dataset, a Definition's file, or problems of KernelBench or "
            "SOL-ExecBench: a file or a folder."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the ops.")] = Path("imported"),
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="KernelBench: fp32 (as given, TF32 off), tf32, bf16 or fp16; each is an op of "
            "its own, with its own baselines and tolerance. Default: fp32."
        ),
    ] = None,
    scale: Annotated[
        int,
        typer.Option(
            help="Problems: divide the file's top-level sizes, or those that workloads choose, "
            "where they stay at least 16.",
            min=1,
        ),
    ] = 1,
    size: Annotated[
        list[str] | None,
        typer.Option(help="Problems: another value of such a size, NAME=SIZE."),
    ] = None,
    op: Annotated[
        str | None, typer.Option(help="KernelBench: the file is a ModelNew for this imported op.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Read an export or a flashinfer-bench dataset as sources, and as ops where they are new; or
    problems of KernelBench or SOL-ExecBench as ops.

    Reports everything that it leaves out. Runs nothing of exports and datasets. A problem runs in
    the sandbox alone, which traces its module; the op is written from the trace.

    Exit code 0: something was imported; 2: nothing, and why; 5: an export was changed.
    """
    from patcher.integrate import ProblemOptions, import_kernel, import_model_new, sizes_of

    output = Output(as_json)
    if op is not None:
        done = import_model_new(op, path, out)
    else:
        options = ProblemOptions(tuple(precision or ("fp32",)), scale, sizes_of(size or []))
        with output.progress() as bar:
            done = import_kernel(path, out, options, bar)
    lines = [f"{out / name}  {digest[:12]}" for name, digest in done.sources.items()]
    lines += [f"{out / name}: a new op" for name in done.ops]
    lines += [f"  note: {one_line(each, 2000)}" for each in done.notes]
    told = (f"{name}: {reason}" for name, reason in done.refused.items())
    lines += [f"  refused: {one_line(each, 2000)}" for each in told]
    output.emit(done, *(Text(line) for line in lines))
    return 0
