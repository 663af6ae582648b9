"""`patcher runs`, `patcher status`: where runs stand, and what they cost."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, PatcherError
from patcher.commands.console import Json, Output, app, examples, runs_dir


@app.command()
@examples("patcher status", "patcher status 20260101-120000-gpt-oss-tiny-1a2b --json")
def status(
    which: Annotated[str, typer.Argument(metavar="RUN", help="Folder, id or `latest`.")] = "latest",
    as_json: Json = False,
) -> int:
    """Show where a run stands and what it cost, also while it is going on.

    Cost has three columns. `used`: as the providers count it. `set aside`: the worst case of calls
    under way or killed. `unknown`: that of calls whose end or counts nobody knows.
    """
    from patcher.runs.run import Run
    from patcher.show.runs import cost_line, cost_table
    from patcher.status import status as status_of

    now = status_of(Run.open(Run.find(runs_dir(), which), read_only=True))
    shown = [cost_table(now.ledger), cost_line(now.ledger)]
    Output(as_json).emit(now, Text(now.sentence()), *(shown if now.ledger.sentence() else []))
    return 0


@app.command()
@examples("patcher runs", "patcher runs --json")
def runs(as_json: Json = False) -> int:
    """List every run, oldest first: its state, its best kernel, and what it cost."""
    from patcher.runs.run import Run
    from patcher.show.runs import runs_table
    from patcher.status import status as status_of

    found, unreadable = [], {}
    for path in Run.list(runs_dir()):
        try:
            found.append(status_of(Run.open(path, read_only=True)))
        except PatcherError as error:
            unreadable[path.name] = error.message
    document = {
        "schema_version": SCHEMA_VERSION,
        "runs": [one.model_dump(mode="json") for one in found],
        "unreadable": unreadable,
    }
    lines = [Text(f"{name}: {why}", style="red") for name, why in unreadable.items()]
    Output(as_json).emit(document, runs_table(found), *lines)
    return 0
