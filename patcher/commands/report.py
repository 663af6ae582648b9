"""`patcher report`: what a run found, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.commands.console import Json, Output, app, examples, runs_dir


@app.command()
@examples(
    "patcher report latest",
    "patcher report RUN --format md",
    "patcher report RUN --patched-profile patched.sqlite",
)
def report(
    which: Annotated[str, typer.Argument(metavar="RUN", help="Folder, id or `latest`.")] = "latest",
    formats: Annotated[str, typer.Option("--format", help="html,md,json")] = "html,md,json",
    patched: Annotated[
        Path | None,
        typer.Option(
            "--patched-profile", help="Profile of the patched engine, to show which rows moved."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write the report of a run: an HTML page, Markdown for a pull request, and JSON.

    Works also while the run is going on, or after it was killed; the report says so.
    """
    from patcher.report.gather import write_report
    from patcher.runs.run import Run
    from patcher.status import status

    run = Run.open(Run.find(runs_dir(), which), read_only=True)
    now = status(run)
    after = None
    if patched is not None:
        from patcher.hotspot import read

        after = read(patched, run.config.model or "the model")
    files = write_report(run, tuple(part.strip() for part in formats.split(",")), after)
    names = [str(path) for path in files]
    document = {**now.model_dump(mode="json"), "files": names}
    Output(as_json).emit(document, Text(now.sentence()), *(Text(name) for name in names))
    return 0
