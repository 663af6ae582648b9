"""`patcher workspace` and `patcher attempt`: agents from outside work under the judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from patcher.bench import SCHEMA_VERSION, Language, load_op
from patcher.commands.console import (
    Json,
    JudgeSpec,
    Output,
    Threads,
    app,
    asked_again,
    examples,
)

if TYPE_CHECKING:  # every other command starts without the prompts
    from patcher.workspace import Line

Command = Literal["compile", "verify", "profile", "results"]


@app.command()
@examples(
    "patcher workspace fused_add_rms_norm task --language cuda",
    "patcher workspace fused_add_rms_norm task --language cpp --threads 1",
    "patcher workspace fused_add_rms_norm task --language triton --judge exchange:jobs",
    "cd task && AGENT 'Read SKILL.md and do what it says.'",
)
def workspace(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    language: Annotated[Language, typer.Option(help="The language of the kernel.")] = Language.CUDA,
    sweep: Annotated[str | None, typer.Option(help="The sweep of the op that is timed.")] = None,
    threads: Threads = None,
    judge: JudgeSpec = None,
    as_json: Json = False,
) -> int:
    """Make a folder in which any coding agent can work on a kernel under the judge.

    It holds SKILL.md, the contract, the reference, a kernel to edit, and the commands ./compile,
    ./verify and ./profile, which call the judge. Every file but the kernel is read-only and hashed;
    a command refuses to run once one was changed. results.jsonl gets a line for each command, with
    its reward (see `patcher evaluate --help`).

    The lines form a hash chain, which is compared with the judge's copy in PATCHER_CACHE. An agent
    that can write there could forge both. Before you rely on a reward, judge the kernel yourself
    (`patcher evaluate OP FILE --reward`), or let another user or machine judge from the start
    (--judge exchange:DIR).
    """
    from patcher.judges import resolved_judge
    from patcher.settings import resolve
    from patcher.workspace import lay_out

    settings = resolve({"judge": judge})
    opened = lay_out(
        load_op(op),
        folder,
        language,
        sweep=sweep,
        threads=threads,
        judge=resolved_judge(settings.judge),  # the commands run in another folder
        policy=settings.tripwires.for_op(op),
    )
    Output(as_json).emit(
        opened.workspace,
        Text(f"{folder}: edit {opened.workspace.file}; read {folder / 'SKILL.md'} first"),
    )
    return 0


@app.command()
@examples(
    "patcher attempt task compile",
    "patcher attempt task verify",
    "patcher attempt task profile --json",
    "patcher attempt task results --json",
)
def attempt(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `patcher workspace` made.")
    ],
    command: Annotated[Command, typer.Argument(metavar="COMMAND")],
    as_json: Json = False,
) -> int:
    """Judge the kernel in a workspace; ./compile, ./verify and ./profile call this.

    compile builds it. verify checks that it is correct. profile judges it against eager and
    torch.compile, a full evaluation each, and gives its reward. results lists the lines so far,
    checked against their hash chain and the judge's copy.

    Exit code 0: it builds, is correct, or is over 5 % faster than eager; 1: it does not; 5: a
    protected file or a line of results.jsonl was changed; 6: the judge is on another machine; run
    it again later.
    """
    from patcher.show.evaluation import print_checks, print_evaluation
    from patcher.workspace import attempt as carried_out
    from patcher.workspace import open_workspace

    output = Output(as_json)
    opened = open_workspace(folder)
    if command == "results":
        lines = opened.ledger.lines()
        told = [line.model_dump(mode="json") for line in lines]
        output.emit({"schema_version": SCHEMA_VERSION, "results": told}, *map(_shown, lines))
        return 0
    with asked_again(), output.progress() as bar:
        tried = carried_out(opened, command, bar)
    if not as_json:
        show = print_evaluation if command == "profile" else print_checks
        for evaluation in tried.evaluations:
            show(output.out, evaluation)
        if tried.log and not tried.evaluations:
            output.out.print(Text(tried.log, style="dim"))
    output.emit(tried, _shown(tried.line))
    return 0 if tried.good else 1


def _shown(line: Line) -> Text:
    what = "built" if line.built else "did not build"
    reward = f"reward {line.reward.value}: {line.reward.why}" if line.reward else what
    return Text(f"{line.seq} {line.stage} {line.digest[:12]}: {reward}")
