"""`patcher record`, `patcher replay`: a finished loop as a folder for others to read and check."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION
from patcher.commands.console import Json, Output, app, examples, runs_dir


@app.command()
@examples("patcher record latest recordings/moe_finalize-cpp", "patcher record 20261121-1203 rec")
def record(
    run: Annotated[str, typer.Argument(help="A run: its id, its folder or `latest`.")],
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    as_json: Json = False,
) -> int:
    """Save every prompt, reply and verdict of a finished agent loop, with a table.

    `patcher replay` checks such a recording. Prompts hold the contract, the sources that the agents
    wrote, and the text that your settings add.
    """
    from patcher.kernel_search.recording import record as write
    from patcher.runs.run import Run

    made = write(Run.find(runs_dir(), run), folder)
    told = f"{len(made.optimisation.iterations)} iterations, recorded in {folder}"
    Output(as_json).emit(made, Text(told))
    return 0


@app.command()
@examples("patcher replay recordings/moe_finalize-cpp", "patcher replay recordings.tar.xz --json")
def replay(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders that `patcher record` wrote, or .tar.xz archives of them."),
    ],
    as_json: Json = False,
) -> int:
    """Run recorded loops again from their replies and verdicts: no model, no compiler, no GPU.

    Exit code 0: each loop ends as recorded; 5: one does not.
    """
    from patcher.kernel_search.recording import read, recorded_op
    from patcher.kernel_search.recording import replay as again
    from patcher.kernel_search.recording_archive import recordings
    from patcher.visible import one_line

    documents, lines = [], []
    with ExitStack() as stack:
        found = [stack.enter_context(recordings(path)) for path in folders]
        for folder in chain.from_iterable(found):
            differences = again(folder)
            recording = read(folder)
            made = recording.optimisation
            changed = recorded_op(folder, recording).digest != recording.contract
            documents.append(
                {"folder": folder.name, "differences": differences, "op_changed": changed}
            )
            speedup = made.best_speedup
            best = f"{speedup:.2f}x" if speedup is not None else "nothing faster"
            same = f"the same {len(made.iterations)} iterations again, best {best}"
            since = "; the op is another than was judged then" if changed else ""
            name = one_line(folder.name, 120)
            lines.append(Text(f"{name}: {'; '.join(differences) or same}{since}"))
    Output(as_json).emit({"schema_version": SCHEMA_VERSION, "recordings": documents}, *lines)
    return 5 if any(each["differences"] for each in documents) else 0
