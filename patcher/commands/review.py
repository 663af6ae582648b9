"""`patcher review`, `accept`, `reject`: a person's word beside the rule's."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from patcher.bench import SCHEMA_VERSION
from patcher.commands.console import Json, Output, app, examples, runs_dir

Which = Annotated[
    str, typer.Argument(metavar="PATCH|RUN", help="A run (`latest`), a bundle, or a patch's id.")
]
Why = Annotated[str | None, typer.Option(help="The reason; required where you overrule the rule.")]
By = Annotated[str | None, typer.Option(help="Your name, if the record should hold it.")]


@app.command()
@examples("patcher review latest", "patcher review patcher-runs/RUN --json")
def review(
    which: Which = "latest",
    by: By = None,
    as_json: Json = False,
) -> int:
    """Show the evidence for a patch; on a terminal, ask for your decision.

    Shows its diff, its checks, the intervals, and the reasons of the rule.
    """
    from patcher.show.review import review_document, review_lines
    from patcher.verdicts.review import find_subject, say, words

    subject = find_subject(runs_dir(), which)
    said = words(subject)
    output = Output(as_json)
    output.emit(review_document(subject, said), *review_lines(subject, said))
    if not as_json and sys.stdin.isatty() and subject.bundle is not None:
        answer = typer.prompt("accept, reject, or later?", default="later").strip().lower()
        if answer in ("accept", "reject"):
            reason = typer.prompt("why?", default="", show_default=False)
            word = say(subject, "accept" if answer == "accept" else "reject", reason, by)
            output.err.print(f"recorded: {word.told}", markup=False)
    return 0


@app.command()
@examples(
    "patcher accept latest", 'patcher accept PATCH-ID --reason "measured again at night: +1.2 %"'
)
def accept(which: Which, reason: Why = None, by: By = None, as_json: Json = False) -> int:
    """Record that a person accepts a patch.

    The verdict of the rule stays in the record.
    """
    return _said("accept", which, reason, by, Output(as_json))


@app.command()
@examples('patcher reject latest --reason "nobody can maintain this source"')
def reject(which: Which, reason: Why = None, by: By = None, as_json: Json = False) -> int:
    """Record that a person rejects a patch, and why.

    The verdict of the rule stays in the record.
    """
    return _said("reject", which, reason, by, Output(as_json))


def _said(word: Any, which: str, reason: str | None, by: str | None, output: Output) -> int:
    from rich.text import Text

    from patcher.verdicts.review import find_subject, say

    subject = find_subject(runs_dir(), which)
    spoken = say(subject, word, reason, by)
    document = {
        "schema_version": SCHEMA_VERSION,
        "run": subject.run.name if subject.run else None,
        "word": spoken.model_dump(mode="json"),
        "overrules": spoken.overrules,
    }
    words = ("report", subject.run.name) if subject.run else ("review", which)
    again = shlex.join(["patcher", *words])
    output.emit(document, Text(f"{subject.name}: {spoken.told}"), Text(f"next: {again}"))
    return 0
