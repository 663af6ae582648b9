"""`patcher memory`: what runs learned, to look at and to forget."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, UsageError
from patcher.commands.console import Json, Output, app, examples

memory_app = typer.Typer(invoke_without_command=True)
app.add_typer(memory_app, name="memory")


@memory_app.callback()
@examples("patcher memory", "patcher memory show --json", "patcher memory forget ID")
def memory(context: typer.Context, as_json: Json = False) -> None:
    """Show what earlier runs learned: rules from failures, measured gains of techniques.

    It is kept as text files that you may edit; `patcher memory path` prints their folder.
    """
    if context.invoked_subcommand is None:
        _show(Output(as_json))


@memory_app.command()
@examples("patcher memory show", "patcher memory show --json")
def show(as_json: Json = False) -> int:
    """List every entry: rules with their counts, techniques with their gains."""
    return _show(Output(as_json))


@memory_app.command()
@examples("patcher memory forget undeclared-name-1a2b3c", "patcher memory forget --all --yes")
def forget(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids that `patcher memory show` lists.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every entry.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm --all.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Remove entries. To stop one from being learned again, give it `muted = true` instead."""
    found = _memory()
    known = [entry.id for entry in (*found.rules(), *found.techniques())]
    if bool(ids) == everything:
        raise UsageError("no entry was named", "give ids of `patcher memory show`, or --all")
    if everything and not (yes or dry_run):
        raise UsageError(f"--all forgets {len(known)} entries", "say --yes, or look: --dry-run")
    gone = found.forget(known if everything else ids, dry_run=dry_run)
    document = {"schema_version": SCHEMA_VERSION, "forgotten": gone, "dry_run": dry_run}
    word = "would forget" if dry_run else "forgot"
    Output(as_json).emit(document, *(Text(f"{word} {each}") for each in gone))
    return 0


@memory_app.command()
@examples("patcher memory path", '$EDITOR "$(patcher memory path)/rules.toml"')
def path(as_json: Json = False) -> int:
    """Print the folder of rules.toml and techniques.toml, which you may edit."""
    folder = _memory().folder
    Output(as_json).emit(
        {"schema_version": SCHEMA_VERSION, "folder": str(folder)},
        Text(str(folder), no_wrap=True, overflow="ignore"),
    )
    return 0


def _memory() -> Any:
    from patcher.memory import open_memory
    from patcher.settings import resolve

    settings = resolve()
    found = open_memory(settings.memory)
    if found is None:
        where = settings.origins["memory"]
        raise UsageError(f"memory is off ({where})", 'set memory = "on" in patcher.toml')
    return found


def _show(output: Output) -> int:
    from patcher.show.memory import memory_lines

    found = _memory()
    rules, techniques = found.rules(), found.techniques()
    document = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(found.folder),
        "rules": [
            {**rule.model_dump(mode="json"), "runs": rule.runs, "promoted": rule.promoted}
            for rule in rules
        ],
        "techniques": [gain.model_dump(mode="json") for gain in techniques],
    }
    output.emit(document, *memory_lines(found.folder, rules, techniques))
    return 0
