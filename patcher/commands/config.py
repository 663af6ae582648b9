"""`patcher config`: each setting, and where its value comes from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION
from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples("patcher config", "patcher config --example > patcher.toml")
def config(
    example: Annotated[
        bool, typer.Option("--example", help="Print a patcher.toml with every setting explained.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show each setting, its value, and where the value comes from."""
    from patcher.settings import NAMES, example_file, resolve

    if example:
        text = example_file()
        shown = Text(text.rstrip("\n"), no_wrap=True, overflow="ignore")
        Output(as_json).emit({"schema_version": SCHEMA_VERSION, "example": text}, shown)
        return 0
    settings = resolve()
    values = settings.model_dump(mode="json")
    rows = {name: {"value": values[name], "origin": settings.origins[name]} for name in NAMES}
    lines = (Text(f"{name} = {row['value']}  ({row['origin']})") for name, row in rows.items())
    Output(as_json).emit({"schema_version": SCHEMA_VERSION, "settings": rows}, *lines)
    return 0
