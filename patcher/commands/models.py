"""`patcher models`: the models that can be served, and the language models that can be asked."""

from __future__ import annotations

from rich.text import Text

from patcher.bench import SCHEMA_VERSION, preset, presets
from patcher.commands.console import Json, Output, app, examples


@app.command()
@examples("patcher models", "patcher models --json")
def models(as_json: Json = False) -> int:
    """List the presets of served models, and the language models that write kernels.

    Says for each key whether it is set, never the key; and which limits servers named in earlier
    runs.
    """
    from patcher.models.limits import list_limits
    from patcher.models.prices import old_prices, prices
    from patcher.models.registry import list_models
    from patcher.settings import resolve
    from patcher.show.models import limits_table, models_table

    rows = {name: preset(name).summary for name in presets()}
    asked = list_models(resolve().models)
    limits, problems = list_limits()
    document = {
        "schema_version": SCHEMA_VERSION,
        "models": rows,
        "language_models": [row.model_dump(mode="json") for row in asked],
        "named_limits": [each.model_dump(mode="json") for each in limits],
        "prices_looked_at": f"{prices().looked_at}",
    }
    served = (Text(f"{name}: {text}") for name, text in rows.items())
    output = Output(as_json)
    for each in [*problems, *filter(None, [old_prices()])]:
        output.err.print(Text(each))
    shown = [Text(), limits_table(limits)] if limits else []
    output.emit(document, Text("served models"), *served, Text(), models_table(asked), *shown)
    return 0
