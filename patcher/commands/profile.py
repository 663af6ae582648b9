"""`patcher profile`: captured or read, ranked, compared, drawn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from patcher.bench import UsageError
from patcher.commands.console import Device, Engine, Json, Output, app, examples
from patcher.commands.workloads import Batch, Prompt, Steps, Weights, workload_of

if TYPE_CHECKING:  # every other command starts without the readers
    from patcher.hotspot import ProfileWarning


@app.command()
@examples(
    "patcher profile gpt-oss-20b --from decode.sqlite --plot decode.svg",
    "patcher profile gpt-oss-20b --from decode.nsys-rep --ncu counters.ncu-rep",
    "patcher profile gpt-oss-20b --from kernels.csv --json",
    "patcher profile gpt-oss-20b --from run.sqlite --window decode",
    "patcher profile gpt-oss-20b --from tokens512.csv --minus tokens256.csv --steps 256",
    "patcher profile --compare stock.sqlite patched.sqlite",
    "patcher profile gpt-oss-20b --batch 8 --input-len 1024   (captures, on a GPU host)",
    "patcher profile gpt-oss-20b --engine vllm --patch norm.zip --keep patched",
    "patcher profile gpt-oss-tiny   (operators on this CPU)",
)
def profile(
    model: Annotated[
        str | None,
        typer.Argument(help="Preset, Hugging Face id or folder; with a file, any name."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="nsys report, SQLite or Parquet export, `nsys stats` output in any format, or a "
            "torch.profiler trace.",
        ),
    ] = None,
    compare_files: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", metavar="BEFORE AFTER", help="Compare two profiles: which rows moved."
        ),
    ] = None,
    minus: Annotated[
        Path | None,
        typer.Option(help="The same run with fewer tokens; the difference is steady decode."),
    ] = None,
    ncu: Annotated[
        Path | None, typer.Option(help="Report or CSV of Nsight Compute, for bytes and FLOPs.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Range or annotation to rank; `all` includes warm-up; default: steady steps."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps on each device, where the source does not tell or tells wrongly.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Rank a trace that hides kernels, with a warning.")
    ] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw one decode step and the ranking (SVG).")
    ] = None,
    engine: Engine = "transformers",
    device: Device = None,
    batch: Batch = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    weights: Weights = "random",
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            help="Keep the captured files in this folder; they contain host and folder names.",
        ),
    ] = None,
    patches: Annotated[
        list[Path] | None,
        typer.Option("--patch", help="A patch bundle that is active during the capture."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Rows to print; default: those that cover 95 % of busy time.", min=1),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Print all columns and kernel names in full.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Rank what decode spends its time in, with the gain that each row could give end to end.

    The rows add up to the busy time of the GPU; each has a recommendation. A fusion chain is a run
    of small kernels that repeats in every layer; its time is also in the rows of its members.
    """
    from patcher.hotspot import compare, read
    from patcher.hotspot.read import UNNAMED
    from patcher.show.profile import compare_table, profile_tables, wide_columns

    output = Output(as_json)
    if patches and (source or compare_files):
        raise UsageError("--patch applies only to a capture", "leave out --from and --compare")
    if compare_files is not None:
        if source or minus or plot_file:
            raise UsageError("--compare takes two files and no other", "leave the others out")
        before, after = (
            read(path, model or UNNAMED, window=window, batch=batch, force=force)
            for path in compare_files
        )
        _warn(output, (*before.warnings, *after.warnings))
        comparison = compare(before, after)
        output.emit(comparison, *compare_table(comparison, top or 15))
        return 0
    if model is None:
        raise UsageError("no model was named", "patcher profile gpt-oss-20b; see: patcher models")
    if source is not None:
        with output.progress() as bar:
            bar(f"read {source.name}", 0, 1)
            found = read(
                source,
                model,
                window=window,
                minus=minus,
                ncu=ncu,
                batch=batch,
                steps=steps,
                force=force,
            )
    else:
        if minus or ncu or window:
            raise UsageError("--minus, --ncu and --window go with --from", "name a profile")
        workload = workload_of(model, device, engine, batch, input_len, output_len, weights)
        from patcher.api.profile import capture_here

        with output.progress() as bar:
            found, told = capture_here(workload, keep, patches or [], bar)
        for line in told:
            output.err.print(Text(line))
    _warn(output, found.warnings)
    if plot_file is not None:
        from patcher.report import plot

        try:
            plot_file.write_text(plot(found), encoding="utf-8")
        except OSError as error:
            message = f"cannot write the plot to {plot_file}: {error.strerror}"
            raise UsageError(message, "give a file in a folder that exists") from error
    if wide:
        output.out.width = max(output.out.width, wide_columns(found))
    output.emit(found, *profile_tables(found, top, wide))
    if plot_file is not None and not as_json:
        output.err.print(f"drawn: {plot_file}", highlight=False)
    return 0


def _warn(output: Output, warnings: Iterable[ProfileWarning]) -> None:
    for warning in warnings:
        if not output.as_json:
            output.err.print(f"[yellow]{warning.kind}:[/]", Text(warning.message))
