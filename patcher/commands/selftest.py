"""`patcher selftest`: the judge's score card."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from patcher.bench import UsageError, pick_device
from patcher.commands.console import (
    Device,
    Json,
    Output,
    app,
    examples,
    in_a_folder,
    write_out,
)

if TYPE_CHECKING:  # every other command starts without the judge
    from patcher.bench.selftest.corpus import CaseResult
    from patcher.bench.selftest.mutations import Killed
    from patcher.bench.selftest.scorecard import ScoreCard


@app.command()
@examples(
    "patcher selftest",
    "patcher selftest --device cuda --out card.json",
    "patcher selftest --only 'cheat/(29|31)'",
    "patcher selftest --corpus checkout/tests/corpus",
    "patcher selftest --mutations",
)
def selftest(
    device: Device = None,
    only: Annotated[
        str, typer.Option(help="Only cases whose KIND/NAME matches this regular expression.")
    ] = "",
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the cases; default: tests/corpus of a checkout (no wheel has them).",
        ),
    ] = None,
    mutations: Annotated[
        bool, typer.Option(help="Remove each guard in turn; the cases must then fail.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Also write the score card to this file, as JSON. It is written after each case, "
            'with "complete": false until the end, so that it survives an interruption.',
            callback=in_a_folder,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Test the judge on this machine with cheats, honest kernels, faults and planted keys.

    It must catch the cheats, accept the honest kernels, survive the faults, and leak no key. Exit
    code 0: it does; 5: it does not. An interruption leaves what was judged in the file of --out.
    """
    if mutations and out is not None:
        raise UsageError("--mutations makes no score card for --out", "leave one of them out")
    output = Output(as_json)
    chosen = pick_device(device)
    with output.progress() as bar:
        if mutations:
            from patcher.bench.selftest.mutations import survived

            killed = list(survived(chosen, bar, only, corpus))
            document = {"mutations": [each.model_dump(mode="json") for each in killed]}
            output.emit(document, mutation_table(killed))
            return 0 if killed and all(each.killed for each in killed) else 5
        from patcher.bench.selftest.scorecard import score

        keep = None if out is None else partial(write_out, out)
        card = score(chosen, only, bar, corpus, keep)
    write_out(out, card)
    output.emit(card, *shown(card))
    return 0 if card.ok else 5


def shown(card: ScoreCard) -> list[Table | Text]:
    """The card for people: the table, then each that came out otherwise."""
    table = Table(title=f"The judge on {card.environment.device}")
    for name, justify in (("", "left"), ("", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_row("sandbox", "", card.sandbox)
    caught = sum(result.passed for result in card.cheats)
    layers = ", ".join(f"{name} {count}" for name, count in sorted(card.by_layer().items()))
    table.add_row("cheats caught", f"{caught}/{len(card.cheats)}", layers)
    alone = sum(result.passed for result in card.without_static)
    table.add_row("by behaviour alone", f"{alone}/{len(card.without_static)}", "static layer off")
    rejected = sum(not result.passed for result in card.honest)
    twins = sum(result.kind == "twin" for result in card.honest)
    what = f"{twins} disarmed twins, {len(card.honest) - twins} others"
    table.add_row("honest rejected", f"{rejected}/{len(card.honest)}", what)
    survived = sum(result.passed for result in card.faults)
    repeated = "and the next clean verdict bit-identical"
    table.add_row("faults survived", f"{survived}/{len(card.faults)}", repeated)
    table.add_row("keys leaked", str(card.leaks), "planted in environment variables")
    wrong = [r for r in (*card.results, *card.without_static) if not r.passed]
    return [table, *map(_line, wrong)]


def _line(result: CaseResult) -> Text:
    expected = " or ".join(result.expected)
    said = f"{result.kind} {result.name}: {result.outcome or 'no verdict'}, expected {expected}"
    return Text(f"{said}; {result.check}: {result.detail}"[:400])


def mutation_table(killed: list[Killed]) -> Table:
    table = Table(title=f"Guards taken out: {sum(k.killed for k in killed)}/{len(killed)} noticed")
    for name in ("guard", "", "by"):
        table.add_column(name)
    for each in killed:
        by = ", ".join(each.by[:3]) + (", ..." if len(each.by) > 3 else "")
        table.add_row(each.guard, "noticed" if each.killed else "NOT NOTICED", by)
    return table
