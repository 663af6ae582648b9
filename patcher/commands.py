"""Every command of the command line, each a thin caller of one room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from bench import (
    SCHEMA_VERSION,
    Candidate,
    Language,
    Outcome,
    UsageError,
    WaitingError,
    Workload,
    load_op,
    load_ops,
    preset,
    presets,
)
from bench.engines import ENGINES
from bench.stats import DEFAULT_PAIRS
from patcher.console import (
    BudgetGpuMinutes,
    BudgetMinutes,
    BudgetTokens,
    BudgetUsd,
    Device,
    Engine,
    FromSolution,
    Islands,
    Json,
    JudgeSpec,
    Output,
    Strategy,
    Threads,
    Width,
    app,
    examples,
    pick_device,
    runs_dir,
)

Batch = Annotated[int | None, typer.Option(help="Sequences decoded together.", min=1)]
Prompt = Annotated[int | None, typer.Option("--input-len", help="Prompt tokens.", min=1)]
Steps = Annotated[int | None, typer.Option("--output-len", help="Decode steps.", min=1)]
Weights = Annotated[str, typer.Option(help="random (seeded, spread-out routing), hub or local.")]
ModelSpec = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="anthropic[:MODEL], openai:MODEL, exchange:DIR, replay:FILE or a NAME of "
        "`patcher models`; default from settings.",
    ),
]
ops_app = typer.Typer(help="The kernel library.", invoke_without_command=True)
app.add_typer(ops_app, name="ops")


def workload_of(
    model: str,
    device: str | None,
    engine: str,
    batch: int | None,
    input_len: int | None,
    output_len: int | None,
    weights: str,
    threads: int | None = None,
) -> Workload:
    from patcher.workloads import workload_for

    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is not driven yet", f"engines: {', '.join(ENGINES)}")
    if weights == "dummy":
        raise UsageError(
            "an engine's dummy weights are near zero: all tokens pick the same experts, decode "
            "reads a fraction of the model, and the faster backend can even change",
            "use --weights random, whose routing is spread out",
        )
    if weights not in ("random", "hub", "local"):
        raise UsageError(f"unknown weights {weights!r}", "say random, hub or local")
    return workload_for(
        model,
        pick_device(device),
        engine=engine,  # type: ignore[arg-type]
        batch=batch,
        input_len=input_len,
        output_len=output_len,
        weights=weights,  # type: ignore[arg-type]
        threads=threads,
    )


@app.command()
@examples("patcher doctor", "patcher doctor --json")
def doctor(as_json: Json = False) -> int:
    """What this machine has for patcher, and the fix for what it lacks."""
    from patcher.doctor import examine
    from patcher.show import findings_table

    findings = examine()
    Output(as_json).emit(
        {
            "schema_version": SCHEMA_VERSION,
            "findings": [finding.model_dump() for finding in findings],
        },
        findings_table(findings),
    )
    return 3 if any(finding.status == "fail" for finding in findings) else 0


@ops_app.callback()
def ops(context: typer.Context, as_json: Json = False) -> None:
    """The kernel library: contracts, baselines, solutions, patch points."""
    from patcher.show import ops_table

    if context.invoked_subcommand is None:
        library = load_ops()
        contracts = [op.contract.model_dump(mode="json") for op in library.values()]
        document = {"schema_version": SCHEMA_VERSION, "ops": contracts}
        Output(as_json).emit(document, ops_table(library))


@ops_app.command("show")
@examples("patcher ops show fused_add_rms_norm")
def ops_show(name: Annotated[str, typer.Argument(help="An op.")], as_json: Json = False) -> int:
    """One op's contract as it is written."""
    op = load_op(name)
    solutions = [{"name": info.name, "summary": info.summary} for info, _ in op.solutions()]
    document = {**op.contract.model_dump(mode="json"), "solutions": solutions}
    Output(as_json).emit(document, Text((op.folder / "op.toml").read_text(encoding="utf-8")))
    return 0


@app.command()
@examples(
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch --sweep bf16-fp32-weight",
    "patcher bundle fused_add_rms_norm kernel.cu norm-patch.zip --tensor-parallel 1,2",
)
def bundle(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    target: Annotated[
        Path, typer.Argument(help="Where the patch bundle goes: a folder, or one .zip file.")
    ],
    language: Annotated[Language | None, typer.Option(help="Default: by the file's name.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    engine: Engine = "transformers",
    tensor_parallel: Annotated[
        str | None,
        typer.Option(help="Workers that may share a layer, as `1,2`; default: any number."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Judge a candidate and, if it is right and faster, make it a patch bundle."""
    from bench import judge
    from patcher.bundling import make_bundle, worker_counts
    from patcher.settings import resolve
    from patcher.show import print_evaluation

    workers = worker_counts(tensor_parallel)
    candidate = Candidate.from_file(load_op(op).name, source, language)
    output = Output(as_json)
    with output.progress() as bar:
        settings = judge.JudgeSettings(
            sweep=sweep, threads=threads, policy=resolve().tripwires.for_op(candidate.op)
        )
        evaluation = judge.evaluate(candidate, settings, bar)
    if evaluation.outcome is not Outcome.CORRECT:
        if as_json:
            output.emit(evaluation)
        else:
            print_evaluation(output.out, evaluation)
        return 1
    manifest = make_bundle(target, candidate, evaluation, engine=engine, tensor_parallel=workers)
    speedup = f"{evaluation.geomean_speedup:.3f}x against {evaluation.baseline}"
    output.emit(manifest, Text(f"{manifest.id} in {target}: {speedup}"))
    return 0


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
    language: Annotated[Language | None, typer.Option(help="What to write it in.")] = None,
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
    iterations: Annotated[int | None, typer.Option(help="Candidates at most.", min=1)] = None,
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
    from patcher.searching import Search
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
    known, language = load_op(op), language or Language.CPP
    if dry_run:
        from patcher.estimate import estimate
        from patcher.show_models import estimate_lines

        found = estimate(known, language, settings, sweep)
        Output(as_json).emit(found, *estimate_lines(found))
        return 0
    numbers = {"width": width, "islands": islands, "seed": seed}
    plan = pipeline.Plan(
        op=known.name,
        language=language,
        sweep=sweep,
        whole=False,
        threads=threads,
        search=Search.of(known, language, strategy, from_solution or (), **numbers),
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
    language: Annotated[Language | None, typer.Option(help="What to write it in.")] = None,
    model: ModelSpec = None,
    strategy: Strategy = "refine",
    width: Width = None,
    iterations: Annotated[int | None, typer.Option(min=1)] = None,
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
    margin_pct: Annotated[float | None, typer.Option("--margin-pct", min=0)] = None,
    pairs: Annotated[int, typer.Option(help="End-to-end pairs at most.", min=6)] = DEFAULT_PAIRS,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """The whole path: profile, agent loop, patch, end-to-end A/B, decision, report."""
    from patcher import pipeline
    from patcher.searching import Search
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
    plan = pipeline.Plan(
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
    from patcher.workloads import workload_for

    # a recorded conversation: it neither needs what was learned nor teaches
    asked = {"model": pipeline.DEMO, "iterations": 3, "judge": "local", "memory": "off"}
    settings = resolve(asked)
    workload = workload_for("gpt-oss-tiny", "cpu", threads=1)
    plan = pipeline.Plan(language=Language.CPP, pairs=40, threads=1, judge_pairs=8)
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
    from patcher.models.ceilings import Ceilings
    from patcher.run import Run

    run = Run.open(Run.find(runs_dir(), which))
    given = Ceilings(
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
    from patcher.gather import write_report
    from patcher.show import attempts_table, ended_line
    from patcher.stopping import Interrupted
    from patcher.watching import Watch

    with run:
        if not output.as_json:
            output.err.print(Text(f"run {run.id} in {run.path}", style="dim"))
        try:
            with Watch(output.err, quiet=output.as_json) as watch:
                result = pipeline.execute(
                    *(run, watch, watch.say, profile_file),
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


def decision_lines(decision: Any) -> list[Text]:
    from patcher.show import VERDICT_COLOURS

    colour = VERDICT_COLOURS[decision.verdict]
    lines = [Text(f"verdict: {decision.verdict}", style=f"bold {colour}")]
    return lines + [Text(f"  - {reason}") for reason in decision.reasons]


@app.command()
@examples(
    "patcher report latest",
    "patcher report RUN --format md",
    "patcher report RUN --patched-profile patched.sqlite",
)
def report(
    which: Annotated[str, typer.Argument(metavar="RUN", help="Folder, id or `latest`.")] = "latest",
    formats: Annotated[str, typer.Option("--format", help="html,md,json")] = "html,md,json",
    patched: Annotated[
        Path | None,
        typer.Option("--patched-profile", help="Of the patched engine: what moved, and how."),
    ] = None,
    as_json: Json = False,
) -> int:
    """The report of a run: one HTML file, Markdown for a pull request, JSON for machines.

    Also of a run that another process works on, or that was killed: it says so, and where.
    """
    from patcher.gather import write_report
    from patcher.run import Run
    from patcher.status import status

    run = Run.open(Run.find(runs_dir(), which), read_only=True)
    now = status(run)
    after = None
    if patched is not None:
        from hotspot import read

        after = read(patched, run.config.model or "the model")
    files = write_report(run, tuple(part.strip() for part in formats.split(",")), after)
    names = [str(path) for path in files]
    document = {**now.model_dump(mode="json"), "files": names}
    Output(as_json).emit(document, Text(now.sentence()), *(Text(name) for name in names))
    return 0


@app.command()
@examples("patcher models")
def models(as_json: Json = False) -> int:
    """Presets of served models, and the language models that can be asked; of a key, yes or no."""
    from patcher.models.registry import listed
    from patcher.settings import resolve
    from patcher.show_models import models_table

    rows = {name: preset(name).summary for name in presets()}
    asked = listed(resolve().models)
    document = {
        "schema_version": SCHEMA_VERSION,
        "models": rows,
        "language_models": [row.model_dump(mode="json") for row in asked],
    }
    served = (Text(f"{name}: {text}") for name, text in rows.items())
    Output(as_json).emit(document, Text("served models"), *served, Text(), models_table(asked))
    return 0
