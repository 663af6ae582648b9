"""`patcher.optimize`: the agent loop on one op; `patcher.read_run`: what a run has found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from patcher.api.display import Chart, StageReport, data_frame, html_table, progress_bar
from patcher.api.evaluate import language_of
from patcher.bench import (
    Count,
    FilePath,
    FilePaths,
    Threads,
    WaitingError,
    as_paths,
    check_arguments,
    load_op,
)
from patcher.extras import names_its_extra
from patcher.report import Report
from patcher.strategies import MOST_ISLANDS

if TYPE_CHECKING:
    from pandas import DataFrame

    from patcher.runs.run import Run

_COLUMNS = (
    *("iteration", "round", "phase", "outcome", "speedup", "score", "detail", "model"),
    *("input_tokens", "output_tokens", "cost_usd", "digest", "file"),
)


class RunReport(Report):
    """What a run has found so far, as `patcher.optimize` and `patcher.read_run` return it.

    `attempts` are the iterations of the agent loop, `best` the evaluation of its best candidate
    and `candidate_source` the source; `profile`, `throughput` and `decision` are there where the
    run got so far.
    """

    folder: Path
    """Where the run is."""

    @property
    def speedup(self) -> float | None:
        """Of the best candidate over the strongest baseline; None: none is right."""
        return self.best.geomean_speedup if self.best else None

    def to_pandas(self) -> DataFrame:
        """The iterations of the agent loop as a data frame.

        Returns:
            One row for each iteration: `outcome` as the judge says it, `speedup` over the
            strongest baseline, tokens and dollars of its replies, the source's digest and file.

        Raises:
            MissingError: pandas is not installed.
        """
        rows = [
            {
                **one.model_dump(include=set(_COLUMNS)),
                **one.usage.model_dump(),
                "outcome": one.outcome.value,
                "speedup": one.geomean_speedup,
            }
            for one in self.attempts
        ]
        return data_frame(rows, _COLUMNS)

    def plot(self) -> Chart:
        """Speedup of each candidate, the best so far as a line, as a chart."""
        from patcher.report.picture import plot_attempts

        return Chart(f"iterations of {self.title}", plot_attempts(self.title, self.attempts))

    def __repr__(self) -> str:
        best = "none is right" if self.speedup is None else f"best {self.speedup:.3f}x"
        verdict = f", {self.decision.verdict}" if self.decision else ""
        return f"<RunReport {self.run_id}: {len(self.attempts)} candidates, {best}{verdict}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        rows = [
            (
                one.iteration,
                one.phase,
                one.outcome.value,
                "" if one.geomean_speedup is None else f"{one.geomean_speedup:.3f}x",
                one.detail,
            )
            for one in self.attempts
        ]
        caption = repr(self).strip("<>").removeprefix("RunReport ")
        return html_table(caption, ("iteration", "phase", "outcome", "speedup", "detail"), rows)


@names_its_extra
@check_arguments
def optimize(
    op: str,
    *,
    language: str = "cpp",
    model: str | None = None,
    analyst: str | None = None,
    diagnoser: str | None = None,
    strategy: str = "refine",
    width: Count | None = None,
    islands: Annotated[int, Field(ge=1, le=MOST_ISLANDS)] | None = None,
    seed: int | None = None,
    from_solutions: FilePaths = (),
    iterations: Count | None = None,
    budget_usd: float | None = None,
    budget_tokens: int | None = None,
    budget_minutes: float | None = None,
    budget_gpu_minutes: float | None = None,
    judge: str | None = None,
    sweep: str | None = None,
    counters: bool = True,
    threads: Threads | None = None,
    runs_dir: FilePath | None = None,
    progress: bool | StageReport = True,
) -> RunReport:
    """Run the agent loop on one op: a model writes kernels under the judge's feedback.

    What is not given comes from the environment and `patcher.toml`, as for the command.

    Args:
        op: an op of the library; `patcher ops` lists them.
        language: what to write it in: `cpp`, `cuda`, `triton`, ...
        model: `anthropic[:MODEL]`, `openai:MODEL`, `exchange:DIR`, `replay:FILE` or a name of
            `patcher models`.
        analyst: another model for the performance analysis, or `off`; on a CPU nobody unless
            named.
        diagnoser: another model to judge failures before a repair, or `off`.
        strategy: `refine`, `single`, `sample`, `beam`, `evolve` or `translate`.
        width: candidates in a round, of strategies that ask for several together.
        islands: populations of `evolve`, at most 64.
        seed: of a strategy's draws; drawn and recorded if None.
        from_solutions: a kernel, or several, to begin from: names of solutions, or files.
        iterations: candidates at most.
        budget_usd: ceiling on what models may cost, in US dollars.
        budget_tokens: ceiling on tokens, in and out.
        budget_minutes: ceiling on the time to ask and judge.
        budget_gpu_minutes: ceiling on the judge's time on the GPU.
        judge: `local`, `exchange:DIR` (served by `patcher worker DIR`), or `ray[:ADDRESS][@GPU]`.
        sweep: which sweep of the op is timed.
        counters: CUDA: whether the analyst reads Nsight Compute's counters.
        threads: CPU threads of both sides.
        runs_dir: the folder for the run's folder.
        progress: whether a bar is shown on a terminal or in a notebook, or a function that is
            called with (stage, done, total).

    Returns:
        What the run found. It is on disk, too: `patcher report` and `patcher resume` know it.

    Raises:
        UsageError: unknown op, language, model or strategy, or settings that do not fit.
        MissingError: a key, a compiler or a device is not here.
        BudgetError: a ceiling is reached before there is a candidate.
        WaitingError: a model or judge outside has not answered; `patcher resume` goes on.

    Examples:
        >>> r = patcher.optimize("fused_add_rms_norm", language="cuda", model="anthropic")
        >>> r.speedup, r.best.outcome
        >>> print(r.candidate_source)
        >>> r.to_pandas()[["iteration", "outcome", "speedup"]]
    """
    from patcher import pipeline
    from patcher.report.gather import write_report
    from patcher.settings import resolve
    from patcher.strategies.search import Search

    settings = resolve(
        {
            "model": model,
            "analyst": analyst,
            "diagnoser": diagnoser,
            "iterations": iterations,
            "budget_usd": budget_usd,
            "budget_tokens": budget_tokens,
            "budget_minutes": budget_minutes,
            "budget_gpu_minutes": budget_gpu_minutes,
            "judge": judge,
            "runs_dir": None if runs_dir is None else Path(runs_dir),
        }
    )
    known, chosen = load_op(op), language_of(language)
    search = Search.of(
        known,
        chosen,
        strategy,
        tuple(map(str, as_paths(from_solutions))),
        width=width,
        islands=islands,
        seed=seed,
    )
    plan = pipeline.RunPlan(
        op=known.name,
        language=chosen,
        sweep=sweep,
        whole=False,
        threads=threads,
        search=search,
        counters=counters,
    )
    with (
        pipeline.start(settings, "optimize", None, None, plan) as run,
        progress_bar(progress) as bar,
    ):
        try:
            pipeline.execute(run, bar, lambda line: bar(line, 0, 1))
        except WaitingError as error:
            raise WaitingError(error.message, f"{error.hint} {run.id}") from None
        write_report(run, ("html", "md", "json"))
        return _report(run)


@names_its_extra
@check_arguments
def read_run(run: FilePath = "latest", *, runs_dir: FilePath | None = None) -> RunReport:
    """What a run has found so far; it may still be going on.

    Args:
        run: a run's folder, its id, the unique beginning of one, or `latest`.
        runs_dir: the folder of the runs; by the settings if None.

    Returns:
        Everything the run has.

    Raises:
        UsageError: no run, or several, fit.
        VerificationError: a file of the run was changed.

    Examples:
        >>> patcher.read_run("latest").to_pandas().plot("iteration", "speedup")
    """
    from patcher.runs.run import Run
    from patcher.settings import resolve

    root = resolve({"runs_dir": None if runs_dir is None else Path(runs_dir)}).runs_dir
    return _report(Run.open(Run.find(root, str(run)), read_only=True))


def _report(run: Run) -> RunReport:
    from patcher.report.gather import gather

    found = gather(run)
    fields: dict[str, Any] = dict(found)
    return RunReport.model_construct(found.model_fields_set | {"folder"}, folder=run.path, **fields)
