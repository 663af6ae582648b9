"""What every command shares: the app, its options, its output."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from patcher.bench import MOST_THREADS, UsageError, WaitingError
from patcher.commands.index import CommandIndex
from patcher.visible import visible

app = typer.Typer(
    name="patcher",
    cls=CommandIndex,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Makes a served language model measurably faster by replacing its hot kernels, proves it, "
    "and can take it back.",
    epilog="Exit codes: 0 done or accepted; 1 ran, nothing accepted; 2 usage, unreadable input "
    "or a failing model server; "
    "3 something missing here; 4 budget spent; 5 verification failed; 6 waiting for a reply; "
    "130 interrupted.",
)

BUDGET, SEARCH, WORKLOAD = "Budget", "Search", "Workload"
"""Panels of options in the help of a command."""


def finite(value: float | None) -> float | None:
    """Refuse `inf` and `nan` as the value of an option."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
BudgetUsd = Annotated[
    float | None,
    typer.Option(
        "--budget-usd",
        help="Ceiling on the cost of model calls.",
        min=0,
        callback=finite,
        rich_help_panel=BUDGET,
    ),
]
BudgetTokens = Annotated[
    int | None,
    typer.Option(
        "--budget-tokens",
        help="Ceiling on tokens, input and output.",
        min=0,
        rich_help_panel=BUDGET,
    ),
]
BudgetMinutes = Annotated[
    float | None,
    typer.Option(
        "--budget-minutes",
        help="Ceiling on the minutes spent asking and judging.",
        min=0,
        callback=finite,
        rich_help_panel=BUDGET,
    ),
]
BudgetGpuMinutes = Annotated[
    float | None,
    typer.Option(
        "--budget-gpu-minutes",
        help="Ceiling on the judge's GPU minutes.",
        min=0,
        callback=finite,
        rich_help_panel=BUDGET,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; default: cuda where there is a GPU.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1, max=MOST_THREADS)]
Iterations = Annotated[
    int | None, typer.Option(help="Maximum number of candidates.", min=1, rich_help_panel=SEARCH)
]
MarginPct = Annotated[
    float | None,
    typer.Option(
        "--margin-pct",
        help="Gain in percent that the whole interval must exceed.",
        min=0,
        callback=finite,
    ),
]
JudgeSpec = Annotated[
    str | None,
    typer.Option(
        "--judge",
        help="local; exchange:DIR, which `patcher worker DIR` serves; or ray[:ADDRESS][@GPU], a "
        "Ray cluster.",
    ),
]
ModelSpec = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="anthropic[:MODEL], openai:MODEL, exchange:DIR, replay:FILE or a NAME of "
        "`patcher models`; default from settings.",
    ),
]
Engine = Annotated[str, typer.Option(help="The engine that runs the model.")]
Strategy = Annotated[
    str,
    typer.Option(help="refine, single, sample, beam, evolve or translate.", rich_help_panel=SEARCH),
]
Width = Annotated[
    int | None,
    typer.Option(
        help="Candidates per round of sample, beam and evolve (default 4).",
        min=1,
        rich_help_panel=SEARCH,
    ),
]
Islands = Annotated[
    int | None,
    typer.Option(help="Populations of evolve (default 2).", min=1, max=64, rich_help_panel=SEARCH),
]
FromSolution = Annotated[
    list[str] | None,
    typer.Option(
        "--from-solution",
        metavar="NAME",
        help="A kernel that works goes into the prompts, to translate or, in the same language, to "
        "beat: a solution's name, or a file.",
        rich_help_panel=SEARCH,
    ),
]


def in_a_folder(out: Path | None) -> Path | None:
    """Before the work, which may take hours, not after it."""
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"{out.parent} is no folder", "create it, or give another --out")
    return out


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Also write the whole result to this file, as JSON.", callback=in_a_folder
    ),
]


def write_out(out: Path | None, record: BaseModel) -> None:
    """Write the whole file that `--out` asks for, or none of it.

    Raises:
        UsageError: it cannot be written.
    """
    if out is None:
        return
    text = record.model_dump_json(indent=1) + "\n"
    try:
        if out.exists() and not out.is_file():  # a device or a pipe cannot be replaced
            out.write_text(text, encoding="utf-8")
            return
        target = out.resolve()  # a link stays a link
        staged = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            staged.write_text(text, encoding="utf-8")
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror}", "give a file that can be written"
        ) from error


def json_text(content: Any, indent: int | None = None) -> str:
    """A JSON document for stdout: its characters as they are where the encoding has them."""
    text = json.dumps(content, indent=indent, ensure_ascii=False) + "\n"
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, indent=indent) + "\n"
    return text


class Output:
    """Prose and progress on stderr, the result on stdout: a JSON document or tables."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.err = Console(stderr=True)
        self.out = Console(width=None if sys.stdout.isatty() else 160)

    def emit(self, record: BaseModel | list[Any] | dict[str, Any], *shown: Any) -> None:
        """The record as JSON, or what is shown for people."""
        if self.as_json:
            content = record.model_dump(mode="json") if isinstance(record, BaseModel) else record
            sys.stdout.write(json_text(content, indent=1))
            return
        for item in shown:
            safe = visible(item.plain) if isinstance(item, Text) else ""
            self.out.print(Text(safe) if safe and safe != item.plain else item)

    @contextmanager
    def progress(self) -> Iterator[Any]:
        from patcher.show.progress import stage_bar

        with stage_bar(self.err, quiet=self.as_json) as bar:
            yield bar


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Say which patcher this is, and exit.",
            is_eager=True,
            callback=lambda on: _version(on),
        ),
    ] = False,
) -> None:
    """See `patcher COMMAND --help`; each has examples."""


def _version(on: bool) -> None:
    if on:
        typer.echo(importlib.metadata.version("patcher"))
        raise typer.Exit


def examples(*lines: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put example lines under a command's help."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        shown = "\n\n".join(f"  $ {line}" for line in lines)
        text = inspect.cleandoc(function.__doc__ or "")
        said = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # typer keeps the breaks of the source
        function.__doc__ = f"{said}\n\n[bold]Examples[/bold]\n\n{shown}"
        return function

    return decorate


@contextmanager
def asked_again() -> Iterator[None]:
    """For a judge elsewhere where there is no run to resume: the same command takes its verdict
    up, and what is raised says so."""
    try:
        yield
    except WaitingError as error:
        hint = error.hint.replace("patcher resume", "the same command again")
        raise WaitingError(error.message, hint) from None


def runs_dir(given: Path | None = None) -> Path:
    from patcher.settings import resolve

    return resolve({"runs_dir": given}).runs_dir
