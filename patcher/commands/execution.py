"""What every command that works on a run shares: run it, report it, show it."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from patcher.bench import Interrupted, WaitingError
from patcher.commands.console import Output


def execute_run(
    run: Any,
    output: Output,
    judge: str | None = None,
    machine_changed: bool = False,
) -> int:
    """Run or resume, show the result, give the exit code."""
    from patcher import pipeline
    from patcher.report.gather import write_report
    from patcher.show.attempts import attempts_table, ended_line
    from patcher.show.comparison import decision_lines
    from patcher.show.watching import Watch

    with run:
        if not output.as_json:
            output.err.print(Text(f"run {run.id} in {run.path}", style="dim"))
        try:
            with Watch(output.err, quiet=output.as_json) as watch:
                result = pipeline.execute(
                    run,
                    watch,
                    watch.say,
                    judge=judge,
                    machine_changed=machine_changed,
                    on_progress=watch.hear,
                )
        except WaitingError as error:
            raise WaitingError(error.message, f"{error.hint} {run.id}") from None
        except KeyboardInterrupt:
            raise Interrupted(f"go on with: patcher resume {run.id}") from None
        files = write_report(run, ("html", "md", "json"))
        result = result.model_copy(update={"reports": tuple(path.name for path in files)})
    shown: list[Any] = []
    if result.optimisation:
        shown.append(attempts_table(result.optimisation.iterations))
        shown.append(ended_line(result.optimisation))
    if result.decision:
        shown += decision_lines(result.decision)
    shown += [Text(f"report: {run.path / name}") for name in result.reports]
    output.emit(result, *shown)
    if result.decision is None:
        worth = result.optimisation is not None and result.optimisation.best_digest is not None
        return 0 if worth else 1
    return 0 if result.decision.verdict == "accept" else 1
