"""`patcher optimize`, `run`, `demo`, `resume`: a run is begun, or gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from patcher.bench import Language, WaitingError, load_op
from patcher.bench.stats.compare import DEFAULT_PAIRS
from patcher.commands.console import (
    BudgetGpuMinutes,
    BudgetMinutes,
    BudgetTokens,
    BudgetUsd,
    Device,
    Engine,
    FromSolution,
    Islands,
    Iterations,
    Json,
    JudgeSpec,
    MarginPct,
    Output,
    Strategy,
    Threads,
    Width,
    app,
    examples,
    runs_dir,
)
from patcher.commands.workloads import Batch, Prompt, Steps, Weights, workload_for, workload_of

ModelSpec = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="anthropic[:MODEL], openai:MODEL, exchange:DIR, replay:FILE or a NAME of "
        "`patcher models`; default from settings.",
    ),
]


@app.command()
@examples(
    "patcher optimize fused_add_rms_norm --language cpp --model exchange:prompts",
    "patcher optimize fused_add_rms_norm --language cuda --iterations 6 --budget-usd 5",
    "patcher optimize fused_add_rms_norm --language cuda --strategy beam --width 4",
    "patcher optimize fused_add_rms_norm --language triton --strategy translate "
    "--from-solution cuda_row",
    "patcher optimize fused_add_rms_norm --language cuda --dry-run",
    "patcher optimize fused_add_rms_norm --language cuda --judge exchange:jobs",
)
def optimize(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    language: Annotated[Language, typer.Option(help="What to write it in.")] = Language.CPP,
    model: ModelSpec = None,
    analyst: Annotated[
        str | None, typer.Option(help="Another model for the analysis agent.")
    ] = None,
    diagnoser: Annotated[
        str | None, typer.Option(help="Another model for the judge of failures.")
    ] = None,
    strategy: Strategy = "refine",
    width: Width = None,
    islands: Islands = None,
    seed: Annotated[
        int | None, typer.Option(help="Of evolve's draws; without one it is drawn and kept.")
    ] = None,
    from_solution: FromSolution = None,
    iterations: Iterations = None,
    budget_usd: BudgetUsd = None,
    budget_tokens: BudgetTokens = None,
    budget_minutes: BudgetMinutes = None,
    budget_gpu_minutes: BudgetGpuMinutes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate what it would take; ask nobody.")
    ] = False,
    judge: JudgeSpec = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    counters: Annotated[
        bool, typer.Option(help="CUDA: whether the analyst reads Nsight Compute's counters.")
    ] = True,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """The agent loop on one op: generation and analysis agents under the judge's feedback."""
    from patcher import pipeline
    from patcher.optimising.searching import Search
    from patcher.settings import resolve

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
        }
    )
    known = load_op(op)
    numbers = {"width": width, "islands": islands, "seed": seed}
    search = Search.of(known, language, strategy, from_solution or (), **numbers)
    if dry_run:
        from patcher.optimising.estimate import estimate
        from patcher.show.models import estimate_lines

        found = estimate(known, language, settings, sweep)
        Output(as_json).emit(found, *estimate_lines(found))
        return 0
    plan = pipeline.RunPlan(
        op=known.name,
        language=language,
        sweep=sweep,
        whole=False,
        threads=threads,
        search=search,
        counters=counters,
    )
    run = pipeline.start(settings, "optimize", None, None, plan)
    return _execute(run, Output(as_json))


@app.command()
@examples(
    "patcher run gpt-oss-tiny --model exchange:prompts",
    "patcher run gpt-oss-20b --language cuda --budget-usd 10",
)
def run(
    served: Annotated[str, typer.Argument(metavar="MODEL", help="The served model.")],
    op: Annotated[str | None, typer.Option(help="Default: the first hotspot covered.")] = None,
    language: Annotated[
        Language | None, typer.Option(help="What to write it in; default: cuda on a GPU, else cpp.")
    ] = None,
    model: ModelSpec = None,
    strategy: Strategy = "refine",
    width: Width = None,
    iterations: Iterations = None,
    budget_usd: BudgetUsd = None,
    budget_tokens: BudgetTokens = None,
    budget_minutes: BudgetMinutes = None,
    budget_gpu_minutes: BudgetGpuMinutes = None,
    judge: JudgeSpec = None,
    source: Annotated[Path | None, typer.Option("--from", help="A profile to start from.")] = None,
    device: Device = None,
    engine: Engine = "transformers",
    batch: Batch = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    weights: Weights = "random",
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    margin_pct: MarginPct = None,
    pairs: Annotated[int, typer.Option(help="End-to-end pairs at most.", min=6)] = DEFAULT_PAIRS,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """The whole path: profile, agent loop, patch, end-to-end A/B, decision, report."""
    from patcher import pipeline
    from patcher.optimising.searching import Search
    from patcher.settings import resolve

    settings = resolve(
        {
            "model": model,
            "iterations": iterations,
            "budget_usd": budget_usd,
            "budget_tokens": budget_tokens,
            "budget_minutes": budget_minutes,
            "budget_gpu_minutes": budget_gpu_minutes,
            "judge": judge,
            "margin_pct": margin_pct,
        }
    )
    workload = workload_of(served, device, engine, batch, input_len, output_len, weights, threads)
    plan = pipeline.RunPlan(
        op=load_op(op).name if op else None,
        language=language,
        sweep=sweep,
        pairs=pairs,
        threads=threads,
        search=Search.of(load_op(op) if op else None, language, strategy, width=width),
    )
    begun = pipeline.start(settings, "run", served, workload, plan)
    return _execute(begun, Output(as_json), source)


@app.command()
@examples("patcher demo", "patcher demo --json")
def demo(as_json: Json = False) -> int:
    """The whole path on this machine's CPU: no GPU, no key, a few minutes.

    The model's replies are a recorded conversation; everything else happens here and now.
    """
    from patcher import pipeline
    from patcher.settings import resolve

    # a recorded conversation: it neither needs what was learned nor teaches
    asked = {"model": pipeline.DEMO, "iterations": 3, "judge": "local", "memory": "off"}
    settings = resolve(asked)
    workload = workload_for("gpt-oss-tiny", "cpu", threads=1)
    plan = pipeline.RunPlan(language=Language.CPP, pairs=40, threads=1, judge_pairs=8)
    begun = pipeline.start(settings, "demo", "gpt-oss-tiny", workload, plan)
    output = Output(as_json)
    if not as_json:
        output.err.print(
            "[bold]demo[/]: gpt-oss-tiny on the CPU. The kernels come from a "
            "[bold]recorded conversation[/] with a language model; building, judging, measuring "
            "and deciding happen on this machine, now."
        )
    return _execute(begun, output)


@app.command()
@examples(
    "patcher resume",
    "patcher resume 20260101-120000-gpt-oss-tiny-1a2b",
    "patcher resume latest --budget-usd 20",
    "patcher resume --judge exchange:jobs",
    "patcher resume latest --machine-changed",
)
def resume(
    which: Annotated[str, typer.Argument(metavar="RUN", help="Folder, id or `latest`.")] = "latest",
    budget_usd: BudgetUsd = None,
    budget_tokens: BudgetTokens = None,
    budget_minutes: BudgetMinutes = None,
    budget_gpu_minutes: BudgetGpuMinutes = None,
    judge: JudgeSpec = None,
    machine_changed: Annotated[
        bool,
        typer.Option(
            "--machine-changed",
            help="On another machine or driver: judge and measure all of it again, keep replies.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Go on with a run that was stopped, killed, or waits for a reply, perhaps with new ceilings
    on the whole of it."""
    from patcher.models.ceilings import SpendingLimits
    from patcher.runs.run import Run

    run = Run.open(Run.find(runs_dir(), which))
    given = SpendingLimits(
        usd=budget_usd,
        tokens=budget_tokens,
        minutes=budget_minutes,
        gpu_minutes=budget_gpu_minutes,
    )
    given.note_in(run)
    return _execute(run, Output(as_json), judge=judge, machine_changed=machine_changed)


def _execute(
    run: Any,
    output: Output,
    profile_file: Path | None = None,
    judge: str | None = None,
    machine_changed: bool = False,
) -> int:
    """Run or resume, show the result, give the exit code."""
    from patcher import pipeline
    from patcher.report.gather import write_report
    from patcher.runs.stopping import Interrupted
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
                    profile_file,
                    judge=judge,
                    machine_changed=machine_changed,
                    told=watch.hear,
                )
        except WaitingError as error:
            raise WaitingError(error.message, f"{error.hint} {run.id}") from None
        except KeyboardInterrupt:
            raise Interrupted("interrupted", f"go on with: patcher resume {run.id}") from None
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
