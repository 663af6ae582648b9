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
from patcher.console import Device, Engine, Json, Output, app, examples, pick_device, runs_dir

Batch = Annotated[int | None, typer.Option(help="Sequences decoded together.", min=1)]
Prompt = Annotated[int | None, typer.Option("--input-len", help="Prompt tokens.", min=1)]
Steps = Annotated[int | None, typer.Option("--output-len", help="Decode steps.", min=1)]
Weights = Annotated[str, typer.Option(help="random (seeded, spread-out routing), hub or local.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
ModelSpec = Annotated[
    str | None,
    typer.Option(
        "--model", help="anthropic[:MODEL], exchange:DIR or replay:FILE; default from settings."
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
    from patcher.pipeline import workload_for

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
    "patcher evaluate fused_add_rms_norm kernel.cpp",
    "patcher evaluate fused_add_rms_norm kernel.cu --sweep bf16-fp32-weight",
    "patcher evaluate fused_add_rms_norm kernel.py --language triton --json",
    "patcher evaluate fused_add_rms_norm kernel.cu --sanitize --counters",
)
def evaluate(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    source: Annotated[Path, typer.Argument(help="One source file.")],
    language: Annotated[Language | None, typer.Option(help="Default: by the file's name.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare with this one, not the strongest.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    device: Device = None,
    pairs: Annotated[int, typer.Option(help="Pairs of timed blocks a point.", min=3)] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds one call may take.", min=0.1)] = 30.0,
    threads: Threads = None,
    tripwires: Annotated[bool, typer.Option(help="Whether the source is looked at.")] = True,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="CUDA: it must pass compute-sanitizer, too.")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="CUDA: what Nsight Compute counts in its kernels.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Judge one candidate in processes of its own: is it right, is it faster?

    Exit code 0: right and faster; 1: anything else that was judged.
    """
    from bench import judge
    from bench.judge.counters import counted, require_ncu
    from patcher.settings import resolve
    from patcher.show import counters_table, print_evaluation

    candidate = Candidate.from_file(load_op(op).name, source, language)
    if counters:
        if candidate.language is Language.CPP or pick_device(device) == "cpu":
            raise UsageError("--counters is for CUDA kernels on a CUDA device", "drop it")
        require_ncu()
    settings = judge.JudgeSettings(
        device=device,
        sweep=sweep,
        baseline=baseline,
        pairs=pairs,
        timeout_s=timeout,
        threads=threads,
        tripwires=tripwires,
        policy=resolve().tripwires,
        sanitize=sanitize,
    )
    output = Output(as_json)
    with output.progress() as bar:
        evaluation = judge.evaluate(candidate, settings, bar)
    if not as_json:
        print_evaluation(output.out, evaluation)
    if counters:
        evaluation = counted(candidate, evaluation, sweep)
    if as_json:
        output.emit(evaluation)
    elif evaluation.counters:
        output.out.print(counters_table(evaluation.counters))
    return 0 if evaluation.outcome is Outcome.CORRECT else 1


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
        settings = judge.JudgeSettings(sweep=sweep, threads=threads, policy=resolve().tripwires)
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
)
def optimize(
    op: Annotated[str, typer.Argument(help="An op of the library.")],
    language: Annotated[Language | None, typer.Option(help="What to write it in.")] = None,
    model: ModelSpec = None,
    analyst: Annotated[
        str | None, typer.Option(help="Another model for the analysis agent.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Candidates at most.", min=1)] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", help="Ceiling on what models may cost.", min=0)
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Which sweep of the op is timed.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """The agent loop on one op: generation and analysis agents under the judge's feedback."""
    from patcher import pipeline
    from patcher.settings import resolve

    settings = resolve(
        {"model": model, "analyst": analyst, "iterations": iterations, "budget_usd": budget_usd}
    )
    plan = pipeline.Plan(
        op=load_op(op).name, language=language, sweep=sweep, whole=False, threads=threads
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
    iterations: Annotated[int | None, typer.Option(min=1)] = None,
    budget_usd: Annotated[float | None, typer.Option("--budget-usd", min=0)] = None,
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
    from patcher.settings import resolve

    settings = resolve(
        {
            "model": model,
            "iterations": iterations,
            "budget_usd": budget_usd,
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

    settings = resolve({"model": pipeline.DEMO, "iterations": 3})
    workload = pipeline.workload_for("gpt-oss-tiny", "cpu", threads=1)
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
@examples("patcher resume", "patcher resume 20260101-120000-gpt-oss-tiny-1a2b")
def resume(
    which: Annotated[str, typer.Argument(metavar="RUN", help="Folder, id or `latest`.")] = "latest",
    as_json: Json = False,
) -> int:
    """Go on with a run that was stopped, killed, or waits for a reply."""
    from patcher.run import Run

    return _execute(Run.open(Run.find(runs_dir(), which)), Output(as_json))


def _execute(run: Any, output: Output, profile_file: Path | None = None) -> int:
    """Run or resume, show the result, give the exit code."""
    from patcher import pipeline
    from patcher.gather import write_report
    from patcher.show import attempts_table

    with run:
        if not output.as_json:
            output.err.print(Text(f"run {run.id} in {run.path}", style="dim"))
        try:
            with output.progress() as bar:
                result = pipeline.execute(run, bar, bar.say, profile_file)
        except WaitingError as error:
            raise WaitingError(error.message, f"{error.hint} {run.id}") from None
        files = write_report(run, ("html", "md", "json"))
        result = result.model_copy(update={"reports": tuple(path.name for path in files)})
    shown: list[Any] = []
    if result.optimisation:
        shown.append(attempts_table(result.optimisation.iterations))
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
    """The report of a run: one HTML file, Markdown for a pull request, JSON for machines."""
    from patcher.gather import write_report
    from patcher.run import Run

    run = Run.open(Run.find(runs_dir(), which), read_only=True)
    after = None
    if patched is not None:
        from hotspot import read

        after = read(patched, run.config.model or "the model")
    files = write_report(run, tuple(part.strip() for part in formats.split(",")), after)
    names = [str(path) for path in files]
    document = {"schema_version": SCHEMA_VERSION, "run": run.id, "files": names}
    Output(as_json).emit(document, *(Text(name) for name in names))
    return 0


@app.command()
@examples("patcher config")
def config(as_json: Json = False) -> int:
    """Each setting, its value and where it comes from."""
    from patcher.settings import NAMES, resolve

    settings = resolve()
    values = settings.model_dump(mode="json")
    rows = {name: {"value": values[name], "origin": settings.origins[name]} for name in NAMES}
    lines = (Text(f"{name} = {row['value']}  ({row['origin']})") for name, row in rows.items())
    Output(as_json).emit({"schema_version": SCHEMA_VERSION, "settings": rows}, *lines)
    return 0


@app.command()
@examples("patcher models")
def models(as_json: Json = False) -> int:
    """Presets of served models."""
    rows = {name: preset(name).summary for name in presets()}
    document = {"schema_version": SCHEMA_VERSION, "models": rows}
    Output(as_json).emit(document, *(Text(f"{name}: {text}") for name, text in rows.items()))
    return 0
