"""`patcher models`, `config`: whom to ask, and what is set where."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, preset, presets
from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples("patcher models")
def models(as_json: Json = False) -> int:
    """Presets of served models, and the language models that can be asked; of a key, yes or no."""
    from patcher.models.registry import listed
    from patcher.settings import resolve
    from patcher.show.models import models_table

    rows = {name: preset(name).summary for name in presets()}
    asked = listed(resolve().models)
    document = {
        "schema_version": SCHEMA_VERSION,
        "models": rows,
        "language_models": [row.model_dump(mode="json") for row in asked],
    }
    served = (Text(f"{name}: {text}") for name, text in rows.items())
    Output(as_json).emit(document, Text("served models"), *served, Text(), models_table(asked))
    return 0


@app.command()
@examples("patcher config", "patcher config --example > patcher.toml")
def config(
    example: Annotated[
        bool, typer.Option("--example", help="A patcher.toml with every setting, explained.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Each setting, its value and where it comes from."""
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
