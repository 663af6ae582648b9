"""`patcher tasks`: tasks for training, composed of PyTorch's operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import UsageError
from patcher.commands.console import Json, Output, app, examples, finite

tasks_app = typer.Typer(no_args_is_help=True, help="Create tasks for training.")
app.add_typer(tasks_app, name="tasks")


@tasks_app.callback()
def tasks() -> None:
    """Create tasks for training, of which each is an op that the judge knows."""


@tasks_app.command()
@examples(
    "patcher tasks create tasks --count 1000 --seed 0",
    "patcher tasks create tasks --count 1000 --against KernelBench/KernelBench",
    "patcher tasks create gpu-tasks --count 200 --device cuda --workers 4",
    "PATCHER_OPS=tasks/ops patcher evaluate OP kernel.cu --reward",
)
def create(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new folder, or one to resume or extend.")
    ],
    count: Annotated[int, typer.Option(help="Number of tasks.", min=1)] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tasks.", min=0)] = 0,
    device: Annotated[
        str, typer.Option(help="cpu or cuda: where they run, and how large they are.")
    ] = "cpu",
    against: Annotated[
        list[Path] | None,
        typer.Option(help="KernelBench problems that no task may resemble: a file or a folder."),
    ] = None,
    held_out_pct: Annotated[
        float,
        typer.Option(help="Share of structures to hold out.", min=0, max=100, callback=finite),
    ] = 10.0,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Require that torch.compile runs each module and agrees; default: where it finds "
            "a compiler.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; default: half of the cores.", min=1, max=256),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Time limit of one candidate.", min=1, callback=finite)
    ] = 300.0,
    as_json: Json = False,
) -> int:
    """Compose modules of one to five operators of PyTorch, filter them, and write them as ops.

    Kept are modules that run eagerly and compiled, repeat themselves bit by bit, depend on their
    inputs, can be judged, and have a structure that no other task, no op of the library and no
    problem of --against has. OUT gets problems/, ops/, tasks.jsonl with the split of each,
    candidates.jsonl with the reason of each that was filtered, times.jsonl, and datasheet and
    decontamination as .json and .md.

    Sizes are chosen so that eager should take 1 to 100 ms, or are those of a decode step. The
    time is measured here and written to times.jsonl, but filters nothing, since no two
    measurements agree: `patcher.tasks.load_tasks(OUT, timed=True)` leaves out the others.

    Exit code 2: OUT holds something else, or was created with other options or versions; 5:
    hardly any candidate passes.
    """
    from patcher.tasks import TaskOptions, create_tasks

    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", "choose cpu or cuda")
    if device == "cuda":
        import torch

        from patcher.bench import MissingError

        if not torch.cuda.is_available():
            raise MissingError("torch finds no GPU here", "--device cpu, or see `patcher doctor`")
    options = TaskOptions(
        count=count,
        seed=seed,
        device="cuda" if device == "cuda" else "cpu",
        held_out_pct=held_out_pct,
        against=tuple(against or ()),
        compiled=compiled,
        workers=workers or max((os.cpu_count() or 1) // 2, 1),
        timeout_s=timeout_s,
    )
    output = Output(as_json)
    with output.progress() as bar:
        done = create_tasks(out, options, bar)
    share = 100 * done.tasks / max(done.examined, 1)
    lines = [
        f"{out}: {done.tasks} tasks, {done.held_out} held out; {share:.0f} % of "
        f"{done.examined} candidates",
        *(f"  {reason}: {number}" for reason, number in done.filtered.items() if reason != "kept"),
        f"read {out / 'datasheet.md'} and {out / 'decontamination.md'}",
    ]
    output.emit(done, *map(Text, lines))
    return 0
