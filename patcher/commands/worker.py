"""`patcher worker`: this machine judges for loops elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.commands.console import Json, Output, app, examples, finite

COLOURS = {
    "correct": "green",
    "refused": "red",
    "failed": "red",
    "left": "yellow",
    "busy": "yellow",
}


@app.command()
@examples(
    "patcher worker exchange",
    "patcher worker exchange --once --json",
    "rsync -a --exclude '.*' laptop:loop/exchange/jobs exchange/",
    "rsync -a --exclude '.*' exchange/results exchange/machines laptop:loop/exchange/",
)
def worker(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The DIR of --judge exchange:DIR.")],
    once: Annotated[
        bool, typer.Option("--once", help="Serve the jobs that are there, then exit.")
    ] = False,
    poll_s: Annotated[
        float,
        typer.Option(
            "--poll",
            help="Seconds between checks for new jobs.",
            min=0.05,
            max=3600,
            callback=finite,
        ),
    ] = 1.0,
    as_json: Json = False,
) -> int:
    """Judge the jobs that agent loops on other machines wrote with --judge exchange:DIR.

    Several workers may share DIR: each job is done once, and the job of a killed worker goes to the
    next. Ctrl-C releases the current job. DIR may be a shared folder, or be copied in both
    directions; a job that is still being copied waits. Both sides trust whoever can write to DIR.

    Exit code 0: every job was judged or refused; 3: this machine lacks what a job needs; 1: the
    judge failed at a job (its traceback is on stderr), which stays for others.
    """
    from patcher.judges.worker import Shift, Worker, WorkerSummary
    from patcher.visible import visible

    output = Output(as_json)
    served: list[WorkerSummary] = []
    incomplete: tuple[str, ...] = ()
    interrupted = False
    with output.progress() as bar:

        def say(job: WorkerSummary) -> None:
            served.append(job)
            took = f" ({job.seconds:.1f} s)" if job.seconds is not None else ""
            parts = (job.job, job.outcome, *filter(None, [job.detail]))
            bar.say(Text(visible(": ".join(parts)) + took, style=COLOURS.get(job.outcome, "")))

        try:
            with Worker(folder, bar, say) as server:
                while True:
                    shift = server.serve()
                    incomplete = shift.incomplete
                    if once:
                        break
                    bar("waiting for jobs", 0, 0)
                    time.sleep(poll_s)
        except KeyboardInterrupt:
            interrupted = True
    for name in incomplete:
        output.err.print(Text(f"{name}: still being copied"))
    told = "interrupted; what was in hand is free for another worker; " if interrupted else ""
    output.emit(
        Shift(jobs=tuple(served), incomplete=incomplete), Text(f"{told}{len(served)} jobs served")
    )
    if interrupted:
        return 130
    outcomes = {job.outcome for job in served}
    return 1 if "failed" in outcomes else 3 if outcomes & {"left", "busy"} else 0
