"""`patcher profile`: captured or read, ranked, compared, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, UsageError
from patcher.commands.console import Device, Engine, Json, Output, app, examples
from patcher.commands.workloads import (
    Batches,
    ElementType,
    Prompt,
    Steps,
    Weights,
    batches_of,
    workload_of,
)

if TYPE_CHECKING:  # every other command starts without the readers
    from patcher.hotspot import Profile, ProfileWarning


@app.command()
@examples(
    "patcher profile gpt-oss-20b --from decode.sqlite --plot decode.svg",
    "patcher profile gpt-oss-20b --from decode.nsys-rep --ncu counters.ncu-rep",
    "patcher profile gpt-oss-20b --from kernels.csv --json",
    "patcher profile gpt-oss-20b --from run.sqlite --window decode",
    "patcher profile gpt-oss-20b --from decode.sqlite --ledger   (against the floor)",
    "patcher profile gpt-oss-20b --from tokens512.csv --minus tokens256.csv --steps 256",
    "patcher profile --compare stock.sqlite patched.sqlite",
    "patcher profile gpt-oss-20b --batch 8 --input-len 1024   (captures, on a GPU host)",
    "patcher profile gpt-oss-20b --engine vllm --batch 1,8,64 --ledger   (one start for all)",
    "patcher profile gpt-oss-20b --engine vllm --patch norm.zip --keep patched",
    "patcher profile gpt-oss-tiny   (operators on this CPU)",
)
def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Preset, Hugging Face id, folder or config.json; with a file, any name."
        ),
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
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger",
            help="Compare a decode step with the least that the model needs: floor, time and gap "
            "of each role; of each kernel, whether it could be faster or fused.",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="The GPU of a file that does not name it, for --ledger: H200."),
    ] = None,
    engine: Engine = "transformers",
    device: Device = None,
    batch: Batches = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    weights: Weights = "random",
    dtype: ElementType = None,
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
    from patcher.ledgers import with_ledger, with_ledger_of
    from patcher.places import places_in
    from patcher.show.profile import compare_table

    output = Output(as_json)
    batches = batches_of(batch)
    several, one_batch = len(batches) > 1, next(iter(batches), None)
    if several and (source or compare_files):
        raise UsageError(
            f"--batch {batch} captures several batches, and a file has the steps of one",
            "give the batch that was profiled, or leave out --from and --compare",
        )
    if several and plot_file:
        raise UsageError("--plot draws one profile", "leave it out, or give one batch")
    of_captures = {
        "--patch": patches,
        "--keep": keep,
        "--device": device,
        "--output-len": output_len,
        "--weights": weights != "random",
        "--input-len": input_len and not (ledger and source),
        "--dtype": dtype and not (ledger and source),
    }
    if (source or compare_files) and (given := [name for name, is_ in of_captures.items() if is_]):
        raise UsageError(
            f"{' and '.join(given)} applies only to a capture", "leave out --from and --compare"
        )
    if gpu and not (ledger and source):
        raise UsageError("--gpu names the GPU of a file, for its ledger", "add --from and --ledger")
    if compare_files is not None:
        if source or minus or plot_file or ledger or ncu or steps:
            raise UsageError("--compare takes two files and no other", "leave the others out")
        before, after = (
            read(path, model or UNNAMED, window=window, batch=one_batch, force=force)
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
                batch=one_batch,
                steps=steps,
                force=force,
                places=places_in(model),
            )
            if ledger:
                bar("ledger", 0, 1)
                found = with_ledger(
                    found, model, batch=one_batch, context=input_len, gpu=gpu, dtype=dtype
                )
    else:
        if minus or ncu or window or steps or force:
            raise UsageError(
                "--minus, --ncu, --window, --steps and --force go with --from", "name a profile"
            )
        most = max(batches, default=None)  # which the engine must take
        workload = workload_of(
            model, device, engine, most, input_len, output_len, weights, dtype=dtype
        )
        traffic = batches or (workload.batch,)
        workloads = [workload.model_copy(update={"batch": batch}) for batch in traffic]
        from patcher.captures import capture_here

        with output.progress() as bar:
            captured, told = capture_here(
                workloads, keep, patches or [], lambda stage: bar(stage, 0, 1)
            )
            if ledger:
                captured = tuple(map(with_ledger_of, captured, workloads))
        for line in told:
            output.err.print(Text(line))
        if several:
            _show_batches(output, batches, captured, top, wide)
            return 0
        [found] = captured
    _warn(output, found.warnings)
    if plot_file is not None:
        from patcher.report import plot

        try:
            plot_file.write_text(plot(found), encoding="utf-8")
        except OSError as error:
            message = f"cannot write the plot to {plot_file}: {error.strerror}"
            raise UsageError(message, "give a file in a folder that exists") from error
    _widen(output, [found] if wide else [])
    output.emit(found, *_tables(found, top, wide))
    if plot_file is not None and not as_json:
        output.err.print(f"drawn: {plot_file}", highlight=False, markup=False)
    return 0


def _warn(output: Output, warnings: Iterable[ProfileWarning]) -> None:
    for warning in warnings:
        if not output.as_json:
            output.err.print(f"[yellow]{warning.kind}:[/]", Text(warning.message))


def _tables(found: Profile, top: int | None, wide: bool) -> Iterator[RenderableType]:
    from patcher.show.profile import profile_tables
    from patcher.show.step_ledger import ledger_tables

    if found.ledger is not None:
        return ledger_tables(found.ledger, f"{found.model}: {found.source}")
    return profile_tables(found, top, wide)


def _widen(output: Output, profiles: Sequence[Profile]) -> None:
    """Make room for whole names."""
    from patcher.show.profile import wide_columns

    output.out.width = max([output.out.width, *map(wide_columns, profiles)])


def _show_batches(
    output: Output,
    batches: Sequence[int],
    profiles: Sequence[Profile],
    top: int | None,
    wide: bool,
) -> None:
    """The tables of each batch, and its step beside those of the others if ledgers are there."""
    from patcher.show.step_ledger import batches_table

    _widen(output, profiles if wide else [])
    shown: list[RenderableType] = []
    for batch, profile in zip(batches, profiles, strict=True):
        shown += [Rule(f"batch {batch}", align="left"), *_tables(profile, top, wide)]
    ledgers = [profile.ledger for profile in profiles if profile.ledger is not None]
    if ledgers:
        shown.append(batches_table(ledgers))
    for warning in dict.fromkeys(warning for profile in profiles for warning in profile.warnings):
        at = [str(b) for b, one in zip(batches, profiles, strict=True) if warning in one.warnings]
        message = f"batch {', '.join(at)}: " if len(at) < len(batches) else ""
        _warn(output, [warning.model_copy(update={"message": message + warning.message})])
    rows = [
        {"batch": batch, "profile": profile.model_dump(mode="json")}
        for batch, profile in zip(batches, profiles, strict=True)
    ]
    output.emit({"schema_version": SCHEMA_VERSION, "profiles": rows}, *shown)
