"""`patcher optimize`: the agent loop on one op."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import Language, UsageError, load_op
from patcher.commands.console import (
    SEARCH,
    BudgetGpuMinutes,
    BudgetMinutes,
    BudgetTokens,
    BudgetUsd,
    FromSolution,
    Islands,
    Iterations,
    Json,
    JudgeSpec,
    ModelSpec,
    Output,
    Strategy,
    Threads,
    Width,
    app,
    examples,
)
from patcher.commands.execution import execute_run
from patcher.commands.workloads import Batch, Prompt, Steps, workload_for


@app.command()
@examples(
    "patcher optimize fused_add_rms_norm --language cpp --model exchange:prompts",
    "patcher optimize fused_add_rms_norm --language cuda --iterations 6 --budget-usd 5",
    "patcher optimize fused_add_rms_norm --language cuda --strategy beam --width 4",
    "patcher optimize fused_add_rms_norm --language triton --strategy translate "
    "--from-solution cuda_row",
    "patcher optimize fused_add_rms_norm --language cuda --dry-run",
    "patcher optimize linear_fp8 --language cuda --served qwen3-30b-a3b-fp8 --engine vllm",
    "patcher optimize decode_attention --language triton --served qwen3-8b --engine vllm "
    "--input-len 4096",
    "patcher optimize fused_add_rms_norm --language cuda --judge exchange:jobs",
    "patcher optimize fused_add_rms_norm --language triton --judge ray@H100",
)
def optimize(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    language: Annotated[Language, typer.Option(help="The language of the kernel.")] = Language.CPP,
    model: ModelSpec = None,
    analyst: Annotated[
        str | None,
        typer.Option(
            help="Another model for the analysis agent, or off; on a CPU nobody unless named."
        ),
    ] = None,
    diagnoser: Annotated[
        str | None, typer.Option(help="Another model for the diagnosis of failures, or off.")
    ] = None,
    strategy: Strategy = "refine",
    width: Width = None,
    islands: Islands = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of evolve; default: drawn, and kept with the run.", rich_help_panel=SEARCH
        ),
    ] = None,
    from_solution: FromSolution = None,
    iterations: Iterations = None,
    budget_usd: BudgetUsd = None,
    budget_tokens: BudgetTokens = None,
    budget_minutes: BudgetMinutes = None,
    budget_gpu_minutes: BudgetGpuMinutes = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate calls, tokens and cost; call no model.")
    ] = False,
    judge: JudgeSpec = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="The sweep of the op that is timed; with other sizes, NAME@AXIS=SIZE,..."
        ),
    ] = None,
    served: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Judge at the sizes of this served model; refuse an op that it has no place for.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="The engine that runs --served; default: transformers."),
    ] = None,
    batch: Batch = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    counters: Annotated[
        bool, typer.Option(help="CUDA: give the analyst Nsight Compute's counters.")
    ] = True,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Run the agent loop on one op: a model writes kernels, the judge tests and times them.

    On a GPU an analysis agent reads each verdict and advises the next candidate. The best kernel
    can be packaged with `patcher bundle`.
    """
    from patcher import pipeline
    from patcher.plan import RunPlan
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
        }
    )
    known = load_op(op)
    numbers = {"width": width, "islands": islands, "seed": seed}
    search = Search.of(known, language, strategy, from_solution or (), **numbers)
    output = Output(as_json)
    if served is not None:
        from patcher.judges.languages import judge_device_kind
        from patcher.sweeps import place_of

        kind = judge_device_kind(settings.judge, language)
        workload = workload_for(
            served,
            kind,
            engine=engine or "transformers",
            batch=batch,
            input_len=input_len,
            output_len=output_len,
        )
        place = place_of(known, kind, sweep, workload)
        if not as_json:
            output.err.print(Text(place.said))
        sweep = place.sweep
    else:
        of_a_model = {
            "--engine": engine,
            "--batch": batch,
            "--input-len": input_len,
            "--output-len": output_len,
        }
        for option, given in of_a_model.items():
            if given is not None:
                raise UsageError(f"{option} is of a served model", "add --served MODEL")
    if dry_run:
        from patcher.kernel_search.estimate import estimate
        from patcher.show.models import estimate_lines

        found = estimate(known, language, settings, sweep, search)
        output.emit(found, *estimate_lines(found))
        return 0
    plan = RunPlan(
        op=known.name,
        language=language,
        sweep=sweep,
        whole=False,
        threads=threads,
        search=search,
        counters=counters,
    )
    run = pipeline.start(settings, "optimize", None, None, plan)
    return execute_run(run, output)
