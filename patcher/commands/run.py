"""`patcher run`, `demo`, `resume`: start a run, or resume one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from patcher.bench import BusyError, Language, load_op
from patcher.bench.stats.compare import DEFAULT_PAIRS
from patcher.commands.console import (
    BudgetGpuMinutes,
    BudgetMinutes,
    BudgetTokens,
    BudgetUsd,
    Device,
    Engine,
    Iterations,
    Json,
    JudgeSpec,
    MarginPct,
    ModelSpec,
    Output,
    Strategy,
    Threads,
    Width,
    app,
    examples,
    runs_dir,
)
from patcher.commands.execution import execute_run
from patcher.commands.workloads import (
    Batch,
    ElementType,
    Prompt,
    Steps,
    Weights,
    workload_for,
    workload_of,
)

DEMO_MODEL = "gpt-oss-wide"
"""Its norms take a fifth of a step: what a kernel gains there shows on a busy machine, too."""


@app.command()
@examples(
    "patcher run gpt-oss-tiny --model exchange:prompts",
    "patcher run gpt-oss-20b --language cuda --budget-usd 10",
)
def run(
    served: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The served model: preset, Hugging Face id, folder or config.json.",
        ),
    ],
    op: Annotated[
        str | None, typer.Option(help="Default: the first hotspot that an op covers.")
    ] = None,
    language: Annotated[
        Language | None,
        typer.Option(help="The language of the kernel; default: cuda on a GPU, else cpp."),
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
    source: Annotated[Path | None, typer.Option("--from", help="Start from this profile.")] = None,
    device: Device = None,
    engine: Engine = "transformers",
    batch: Batch = None,
    input_len: Prompt = None,
    output_len: Steps = None,
    weights: Weights = "random",
    dtype: ElementType = None,
    sweep: Annotated[str | None, typer.Option(help="The sweep of the op that is timed.")] = None,
    margin_pct: MarginPct = None,
    pairs: Annotated[
        int, typer.Option(help="Maximum number of end-to-end pairs.", min=6)
    ] = DEFAULT_PAIRS,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Profile a model, optimize its hottest op, patch it, measure it, decide, report.

    This is the whole path. A run that stops early is resumed with `patcher resume`.
    """
    from patcher import pipeline
    from patcher.plan import RunPlan
    from patcher.settings import resolve
    from patcher.strategies.search import Search

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
    workload = workload_of(
        served, device, engine, batch, input_len, output_len, weights, threads, dtype
    )
    plan = RunPlan(
        op=load_op(op).name if op else None,
        language=language,
        sweep=sweep,
        pairs=pairs,
        threads=threads,
        search=Search.of(load_op(op) if op else None, language, strategy, width=width),
    )
    begun = pipeline.start(settings, "run", served, workload, plan, source)
    return execute_run(begun, Output(as_json))


@app.command()
@examples("patcher demo", "patcher demo --json")
def demo(as_json: Json = False) -> int:
    """Run the whole path on this machine's CPU: no GPU, no key, a few minutes.

    The replies of the language model come from a recorded conversation. Everything else happens on
    this machine, now: building, judging, measuring, deciding.
    """
    from patcher import pipeline
    from patcher.plan import DEMO, RunPlan
    from patcher.runs.run import Run
    from patcher.settings import resolve

    # a recorded conversation: it neither needs what was learned nor teaches
    asked = {
        "model": DEMO,
        "iterations": 2,
        "judge": "local",
        "memory": "off",
        # more than a real run asks for: on a desktop at work, less proves nothing
        "margin_pct": 2.0,
    }
    settings = resolve(asked)
    workload = workload_for(DEMO_MODEL, "cpu", threads=1)
    plan = RunPlan(
        language=Language.CPP,
        pairs=60,
        # of 256 sequences at once: more positions than 200 steps of eight
        quality_steps=8,
        threads=1,
        judge_pairs=8,
    )
    begun = pipeline.start(settings, "demo", DEMO_MODEL, workload, plan)
    output = Output(as_json)
    if not as_json:
        output.err.print(
            f"[bold]demo[/]: {DEMO_MODEL} on the CPU. The kernels come from a "
            "[bold]recorded conversation[/] with a language model; building, judging, measuring "
            "and deciding happen on this machine, now."
        )
    try:
        return execute_run(begun, output)
    except BusyError as busy:
        if not as_json:
            output.err.print(Text(f"{busy.message}; resume the run once", style="dim"))
    return execute_run(Run.open(begun.path), output)


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
            help="On another machine or driver: judge and measure everything again; keep replies.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Resume a run that was stopped or killed, or that waits for a reply.

    New budgets apply to the whole run, not to what is left of it.
    """
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
    return execute_run(run, Output(as_json), judge=judge, machine_changed=machine_changed)
