"""`python -P -m patcher.bench.lab.sittings COMMAND LOOPS ...`: see README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from patcher.bench import PatcherError
from patcher.bench.lab.sittings import keeping, travel
from patcher.bench.lab.sittings.loops import LoopFolder, read_problems

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Loops = Annotated[Path, typer.Argument(metavar="LOOPS", help="The folder of the loops.")]
Only = Annotated[list[str] | None, typer.Option(metavar="NAME", help="This loop alone; repeat it.")]


@app.command()
def start(
    loops: Loops,
    problems: Annotated[Path, typer.Argument(help="A line a loop: NAME OP [OPTIONS].")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: options of `patcher optimize` for all loops."),
    ] = None,
    only: Only = None,
    untold: Annotated[
        bool, typer.Option("--untold", help="No worker has told yet what its machine is.")
    ] = False,
) -> None:
    """Start the loops that are not there yet: each writes its first prompt."""
    folder = LoopFolder(loops)
    _end(folder, folder.start(read_problems(problems), options or (), only or (), untold))


@app.command()
def step(loops: Loops, only: Only = None) -> None:
    """Resume all: take in replies and verdicts, write jobs and the next prompts."""
    folder = LoopFolder(loops)
    _end(folder, folder.step(only or ()))


@app.command()
def state(loops: Loops) -> None:
    """Tell which replies and verdicts are waited for, and which loops ended."""
    folder = LoopFolder(loops)
    folder.require()
    _end(folder, [])


@app.command()
def pack(
    loops: Loops,
    anew: Annotated[bool, typer.Option("--anew", help="Pack code and packages again.")] = False,
) -> None:
    """Fill LOOPS/travel with what a sitting needs."""
    for file in travel.pack(LoopFolder(loops), anew):
        print(f"{file.stat().st_size:>12,} {file}")


@app.command()
def back(
    loops: Loops, out: Annotated[Path, typer.Argument(metavar="OUT", help="Of sitting.sh.")]
) -> None:
    """Take in what a sitting brought back, and resume all."""
    folder = LoopFolder(loops)
    print(travel.back(folder, out), end="")
    _end(folder, folder.step())


@app.command()
def keep(loops: Loops, file: Annotated[Path, typer.Argument(metavar="FILE.tar.xz")]) -> None:
    """Make one file of unfinished loops."""
    print(f"{file}: {keeping.keep(LoopFolder(loops), file):,} bytes")


@app.command()
def restore(
    loops: Loops,
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.xz")],
    same_code: Annotated[
        bool, typer.Option("--same-code", help="The kept commit's code, not this checkout's.")
    ] = False,
) -> None:
    """Unpack kept loops into a new folder, and go on with them."""
    folder = LoopFolder(loops)
    if told := keeping.restore(file, folder, same_code):
        print(f"another code: {told}", file=sys.stderr)
    _end(folder, [])


def _end(folder: LoopFolder, failed: list[str]) -> None:
    for line in folder.state():
        print(line)
    for text in failed:
        print(text, file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def main() -> None:
    try:
        app()
    except PatcherError as error:
        print(f"error: {error.message}; {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
